// The predicted seconds of a step: its streams, and its pipeline's micro-batches over the ranks.
import { useEffect, useState } from "preact/hooks";
import { ask } from "./ask";
import { Card, Table, Trouble } from "./parts";
import * as show from "./show";
import type { Plan, Slot, Span, Strip } from "./types";

const W = 1000;
const H = 26; // of a rank's row

export function SecondsCard({ plan, query }: { plan: Plan; query: string }) {
  const { spans } = plan.timeline;
  return (
    <>
      <Card title="Seconds of the step (predicted)">
        {spans.length ? <Streams spans={spans} /> : <p id="no-seconds">{plan.time.because}</p>}
      </Card>
      {Number(plan.recipe.parallel.pp ?? 1) > 1 && <PipelineCard query={query} ranks={Number(plan.recipe.parallel.pp)} />}
    </>
  );
}

const STREAMS: Record<string, string> = {
  compute: "computing", links: "exchanging", host: "waiting for the host", pipeline: "waiting for a stage",
};

function Streams({ spans }: { spans: Span[] }) {
  const end = Math.max(...spans.map((s) => s.start + s.duration), 1e-12);
  const streams = [...new Set([...spans].sort((a, b) => a.start - b.start).map((s) => s.stream))];
  const ops = [...new Set(spans.map((s) => s.op))];
  return (
    <>
      <div class="bars streams" id="seconds">
        {streams.map((stream) => {
          const own = spans.filter((s) => s.stream === stream);
          return (
            <div class="bar">
              <span class="barname">{STREAMS[stream] ?? stream}</span>
              <div class="track">
                <svg viewBox="0 0 1000 40" preserveAspectRatio="none" role="img"
                  aria-label={`${STREAMS[stream] ?? stream}: the table below has its spans`}>
                  {own.map((s) => (
                    <rect x={(s.start / end) * 1000} width={Math.max((s.duration / end) * 1000, 1)} height="40"
                      class={`span s${ops.indexOf(s.op) % 6}`}><title>{`${s.op}: ${show.seconds(s.duration)}`}</title></rect>
                  ))}
                </svg>
                <div class="labels" aria-hidden="true">
                  {own.filter((s) => s.duration / end > 0.09).map((s) => (
                    <span class={`ink s${ops.indexOf(s.op) % 6}`}
                      style={{ left: `${(s.start / end) * 100}%`, width: `${(s.duration / end) * 100}%` }}>{s.op.replaceAll("_", " ")}</span>
                  ))}
                </div>
              </div>
              <span class="n">{show.seconds(own.reduce((sum, s) => sum + s.duration, 0))}</span>
            </div>
          );
        })}
      </div>
      <p class="soft small">
        One rank, end to end. Of exchanges only what no computing covers is drawn; what runs beside
        computing takes no seconds of the step.
      </p>
      <Table label="Spans" rows={spans} columns={[
        { head: "work", short: true, cell: (s) => <><svg class="key" viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" rx="3" class={`s${ops.indexOf(s.op) % 6}`} /></svg> {s.op.replaceAll("_", " ")}</> },
        { head: "where", short: true, cell: (s) => STREAMS[s.stream] ?? s.stream },
        { head: "takes", number: true, cell: (s) => show.seconds(s.duration) },
        { head: "because", cell: (s) => s.because },
      ]} />
    </>
  );
}

const PASSES: Record<string, string> = { F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights" };

function PipelineCard({ query, ranks }: { query: string; ranks: number }) {
  const [found, setFound] = useState<{ of: string; strip: Strip | null; error: unknown } | null>(null);
  useEffect(() => {
    let still = true;
    ask<Strip | null>(`pipeline?${query}`).then(
      (a) => still && setFound({ of: query, strip: a.data, error: null }),
      (error) => still && setFound({ of: query, strip: null, error }),
    );
    return () => { still = false; };
  }, [query]);
  const now = found?.of === query ? found : null;
  const strip = now?.strip;
  return (
    <Card title="Pipeline: micro-batches over its ranks (predicted)" id="pipeline">
      {now?.error ? <Trouble error={now.error} /> : !strip ? <p role="status" class="soft">simulating…</p> : (
        <>
          <p class="small">
            {strip.kind} on {ranks} ranks, {show.whole(strip.micro_batches)} micro-batches
            {strip.chunks > 1 && <>, {strip.chunks} chunks a rank</>}; {strip.because}
          </p>
          {strip.ranks.length > 0 && <Rows strip={strip} seconds={strip.seconds!} />}
        </>
      )}
    </Card>
  );
}

function Rows({ strip, seconds }: { strip: Strip; seconds: number }) {
  const [at, setAt] = useState<[number, number]>([0, 0]); // rank, piece
  const slot = strip.ranks[at[0]]![at[1]]!;
  const passes = Object.keys(PASSES).filter((pass) => strip.ranks[0]!.some(([name]) => name === pass));
  const busy = strip.ranks.map((slots) => slots.reduce((sum, [, , , start, end]) => sum + end - start, 0));
  const key = (event: KeyboardEvent) => {
    const along = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key] ?? 0;
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0;
    if (!along && !across) return;
    event.preventDefault();
    setAt(([rank, piece]) => {
      const next = Math.min(strip.ranks.length - 1, Math.max(0, rank + across));
      return [next, Math.min(strip.ranks[next]!.length - 1, Math.max(0, piece + along))];
    });
  };
  return (
    <>
      <div class="strip-rows">
        <div class="strip-names" aria-hidden="true">{strip.ranks.map((_, rank) => <span>rank {rank}</span>)}</div>
        <svg id="strip" viewBox={`0 0 ${W} ${H * strip.ranks.length}`} preserveAspectRatio="none" tabindex={0}
          role="slider" aria-label="The pipeline; the arrow keys step through its pieces and ranks" aria-valuemin={0}
          aria-valuemax={strip.ranks[at[0]]!.length - 1} aria-valuenow={at[1]} aria-valuetext={tell(at[0], slot, strip)}
          style={{ height: `${H * strip.ranks.length}px` }} onKeyDown={key}
          onPointerMove={(event) => {
            const box = event.currentTarget.getBoundingClientRect();
            const rank = Math.min(strip.ranks.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * strip.ranks.length)));
            const when = ((event.clientX - box.left) / box.width) * seconds;
            const piece = strip.ranks[rank]!.findIndex(([, , , start, end]) => start <= when && when < end);
            if (piece >= 0) setAt([rank, piece]);
          }}>
          {strip.ranks.map((slots, rank) => passes.map((pass) => [0, 1].map((odd) => (
            <path class={`p${pass}${odd ? " odd" : ""}`} d={slots
              .filter(([name, batch]) => name === pass && batch % 2 === odd)
              .map((one) => box(one, rank, seconds)).join("")} />
          ))))}
          <path class="chosen" d={box(slot, at[0], seconds)} />
        </svg>
      </div>
      <div class="xs strip-xs"><span>0</span><span>{show.seconds(seconds)}</span></div>
      <p class="small">
        {passes.map((pass) => (
          <span class="legend"><svg class="key" viewBox="0 0 12 12" aria-hidden="true"><rect class={`p${pass}`} width="12" height="12" rx="3" /></svg>{PASSES[pass]}</span>
        ))}
        <span class="legend">paler: every other micro-batch; gaps: nothing to work on</span>
      </p>
      <p class="small" id="piece" aria-live="polite">{tell(at[0], slot, strip)}</p>
      <Table label="Ranks of the pipeline" rows={busy.map((works, rank) => ({ works, rank }))} columns={[
        { head: "rank", cell: ({ rank }) => rank },
        { head: "works", number: true, cell: ({ works }) => show.seconds(works) },
        { head: "waits", number: true, cell: ({ works }) => show.seconds(Math.max(0, seconds - works)) },
        { head: "share of waiting", number: true, cell: ({ works }) => show.share(Math.max(0, 1 - works / seconds)) },
      ]} />
    </>
  );
}

function box([, , , start, end]: Slot, rank: number, seconds: number): string {
  const [x, width] = [(start / seconds) * W, ((end - start) / seconds) * W];
  return `M${x.toFixed(2)} ${rank * H + 2}h${width.toFixed(2)}v${H - 4}h${(-width).toFixed(2)}z`;
}

function tell(rank: number, [pass, batch, chunk, start, end]: Slot, strip: Strip): string {
  const part = strip.chunks > 1 ? `, chunk ${chunk}` : "";
  return `rank ${rank}: ${PASSES[pass]} of micro-batch ${batch}${part}, from ${show.seconds(start)} to ${show.seconds(end)}`;
}
