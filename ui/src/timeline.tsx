// Memory over one step, event by event, from the certificate; beside it what is predicted of the
// same plan: each phase's peak, the seconds of its streams, its pipeline.
import { useState } from "preact/hooks";
import { send } from "./ask";
import { Axis } from "./charts";
import { Text } from "./controls";
import { useDraft } from "./draft";
import { Bar, Card, Key, Name, Table, Trouble, Verdict, partsOf, room, sumUp, type Part } from "./parts";
import * as show from "./show";
import { SecondsCard } from "./seconds";
import { command, queryOf, requestOf, type Keys } from "./state";
import type { Certificate, Curve, Plan, Point, StepMemory, Stream, Words } from "./types";

const W = 1000;
const H = 360;
const ROWS = 60;

export function TimelineScreen({ keys, set, words }: { keys: Keys; set: (keys: Keys) => void; words: Words }) {
  const [found, setFound] = useState<{ of: string; made: StepMemory } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const rank = keys._rank ?? "";
  const query = requestOf(keys);
  const of = JSON.stringify([query, rank]);
  const certify = async () => {
    if (busy) return; // a button that is disabled would lose the focus
    setBusy(true);
    setError(null);
    try {
      const wanted = { query, rank: rank === "" ? null : Number(rank) };
      setFound({ of, made: (await send<StepMemory>("certify", wanted)).data });
    } catch (trouble) {
      setError(trouble);
    }
    setBusy(false);
  };
  const stale = found != null && found.of !== of;
  const own = !keys.framework || keys.framework === "memfit";
  return (
    <div class="answer" aria-busy={busy}>
      {own ? (
        <Card title="The trainer's own step, on fake tensors">
          <div class="row filters">
            <Text id="rank" label="Rank" value={rank} example="the fullest"
              set={(value) => set({ ...keys, _rank: value.replace(/\D/g, "") })} />
            <button type="button" class="main" id="certify" aria-disabled={busy} onClick={() => void certify()}>
              {busy ? "Certifying…" : "Certify and draw"}
            </button>
          </div>
          <pre>{`${command(keys)} --folder runs/first\nmemfit certify runs/first/plan.json --timeline`}</pre>
          {stale && <p class="soft">The request has changed since; certify again.</p>}
        </Card>
      ) : (
        <Card title={`The step of ${keys.framework}`}>
          <p id="no-certificate">
            A certificate runs memfit's own step, so there is none of {keys.framework}'s: its memory event by
            event is not known here. Below stands what is predicted of it.
          </p>
          <pre>{command(keys)}</pre>
        </Card>
      )}
      {error ? <Trouble error={error} /> : null}
      {own && <p role="status" class="headline">
        {busy ? <span class="soft">certifying; this runs the step once</span> : found && (
          <>
            <Verdict memory={found.made.certificate.memory} words={words} />
            <span>{found.made.certificate.device} {room(found.made.certificate.memory)}</span>
          </>
        )}
      </p>}
      {found && <Drawn made={found.made} words={words} />}
      <Predicted keys={keys} words={words} bare={!found} />
    </div>
  );
}

// What the plan knows without a certificate; `bare`: nothing else on the screen shows its memory.
function Predicted({ keys, words, bare }: { keys: Keys; words: Words; bare: boolean }) {
  const query = queryOf(keys);
  const { plan, error } = useDraft(query);
  if (error) return <Trouble error={error} />;
  if (!plan) return <p role="status" class="soft">planning…</p>;
  return (
    <>
      {bare && <PhasesCard plan={plan} words={words} />}
      <SecondsCard plan={plan} query={query} />
    </>
  );
}

// The predicted peak of each phase by kind, on one scale.
function PhasesCard({ plan, words }: { plan: Plan; words: Words }) {
  const order = Object.keys(words.colours);
  const phases = Object.keys(words.phases)
    .map((phase) => ({ phase, entries: plan.ledger.entries.filter((entry) => entry.phase === phase) }))
    .filter(({ entries }) => entries.length)
    .map(({ phase, entries }) => ({ phase, parts: sumUp(entries, order) }));
  if (!phases.length) return null;
  const total = (parts: Part[]) => parts.reduce((sum, part) => sum + part.nbytes, 0);
  const full = Math.max(...phases.map(({ parts }) => total(parts)), 1);
  const kinds = order.filter((kind) => phases.some(({ parts }) => parts.some((part) => part.kind === kind)));
  return (
    <Card title={`Memory at the peak of each phase (predicted${plan.recipe.device ? `, ${worldOf(plan)}` : ""})`}>
      <div class="bars phasebars">
        {phases.map(({ phase, parts }) => (
          <Bar name={`${words.phases[phase]}${phase === plan.memory.peak_phase ? " (peak)" : ""}`}
            parts={parts} limit={null} full={full} words={words} />
        ))}
      </div>
      <p class="small">
        {kinds.map((kind) => <span class="legend"><Key kind={kind} words={words} />{kind.replace("_", " ")}</span>)}
      </p>
    </Card>
  );
}

function worldOf(plan: Plan): string {
  const axes = Object.entries(plan.recipe.parallel).filter(([axis, n]) => axis !== "zero" && typeof n === "number" && n > 1);
  return axes.length ? `the fullest device of ${axes.map(([axis, n]) => `${axis} ${n}`).join(", ")}` : "one device";
}

function Drawn({ made, words }: { made: StepMemory; words: Words }) {
  const { certificate, curve } = made;
  const parts = partsOf(certificate.memory, Object.keys(words.colours));
  return (
    <>
      {made.because && <p class="soft">No plan: {made.because}.</p>}
      <Card title={`Memory over the step's allocations and releases${made.rank == null ? "" : `, rank ${made.rank} of ${made.ranks}`}`}>
        <Area curve={curve} certificate={certificate} words={words} />
      </Card>
      <Card title="At the peak">
        <div class="bars">
          <Bar name="certified" parts={parts} limit={certificate.memory.usable} words={words} />
        </div>
        <Table label="Alive at the peak" rows={certificate.at_peak.slice(0, ROWS)} columns={[
          { head: "kind", short: true, cell: (t) => <><Key kind={t.kind} words={words} /> {t.kind.replace("_", " ")}</> },
          { head: "module", cell: (t) => <Name text={t.module || "(outside any module)"} /> },
          { head: "made by", cell: (t) => <><Name text={t.op} /><br /><span class="soft"><Name text={t.source} /></span></> },
          { head: "each", number: true, cell: (t) => `${show.whole(t.count)} x ${show.bytes(t.nbytes)}` },
          { head: "together", number: true, cell: (t) => show.bytes(t.count * t.nbytes) },
        ]} />
        {certificate.at_peak.length > ROWS && (
          <p class="soft small">{certificate.at_peak.length - ROWS} more rows in certificate.json</p>
        )}
      </Card>
      <Card title="Holds for"><ul>{certificate.bounds.map((line) => <li>{line}</li>)}</ul></Card>
    </>
  );
}

function Area({ curve, certificate, words }: { curve: Curve; certificate: Certificate; words: Words }) {
  const [at, setAt] = useState(curve.peak);
  const { memory } = certificate;
  const highest = Math.max(...curve.points.map((p) => Math.max(p[6].reduce((a, b) => a + b, 0), p[5] ?? 0)), 1);
  const context = (memory.device_total ?? 0) - (memory.peak_reserved ?? 0);
  const limit = memory.usable == null ? null : memory.usable - (memory.peak_reserved == null ? 0 : context);
  const drawn = limit != null && limit > 0 && limit <= highest * 1.6 ? limit : null;
  const top = Math.max(highest, drawn ?? 0) * 1.04;
  const x = (event: number) => (W * event) / Math.max(curve.events, 1);
  const y = (n: number) => H * (1 - n / top);
  const step = (by: number) => setAt((now) => Math.min(curve.points.length - 1, Math.max(0, now + by)));
  const point = curve.points[at]!;
  const peak = curve.points[curve.peak]!;
  const nearest = (event: number) => {
    let best = 0;
    curve.points.forEach((p, i) => {
      if (Math.abs(p[0] - event) < Math.abs(curve.points[best]![0] - event)) best = i;
    });
    return best;
  };
  const reserved = curve.points.filter((p) => p[5] != null);
  return (
    <figure class="chart tall">
      <Axis top={top} ticks={show.byteTicks(top)} say={show.bytes} />
      <div class="plotarea">
        <svg id="curve" viewBox={`0 0 ${W} ${H}`} preserveAspectRatio="none" tabindex={0} role="slider"
          aria-label="Memory over the step; the arrow keys step through it" aria-valuemin={0}
          aria-valuemax={curve.points.length - 1} aria-valuenow={at} aria-valuetext={say(point, curve)}
          onPointerMove={(event) => {
            const box = event.currentTarget.getBoundingClientRect();
            setAt(nearest(((event.clientX - box.left) / box.width) * curve.events));
          }}
          onKeyDown={(event) => {
            const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
            if (event.key === "Home") setAt(curve.peak);
            if (by) step(by);
            if (by || event.key === "Home") event.preventDefault();
          }}>
          {curve.stretches.map(([phase, from, to], index) => (
            <rect class={index % 2 ? "band odd" : "band"} x={x(from)} width={x(to) - x(from)} height={H}>
              <title>{words.phases[phase] ?? phase}</title>
            </rect>
          ))}
          {areas(curve, x, y).map(([kind, points]) => (
            <polygon fill={words.colours[kind]} points={points}><title>{kind}</title></polygon>
          ))}
          {reserved.length > 0 && (
            <polyline class="reserved" points={reserved.map((p) => `${x(p[0]).toFixed(1)},${y(p[5]!).toFixed(1)}`).join(" ")} />
          )}
          {drawn != null && <line class="limitline" x1="0" x2={W} y1={y(drawn)} y2={y(drawn)} />}
          <line class="peakline" x1={x(peak[0])} x2={x(peak[0])} y1="0" y2={H} />
          <line class="hair" x1={x(point[0])} x2={x(point[0])} y1="0" y2={H} />
        </svg>
        <Phases curve={curve} words={words} />
      </div>
      <div class="xs"><span>event 0</span><span>event {show.whole(curve.events)}</span></div>
      <figcaption class="small">
        {curve.kinds.map((kind) => (
          <span class="legend"><Key kind={kind} words={words} />{kind.replace("_", " ")}</span>
        ))}
        {reserved.length > 0 && <span class="legend">solid line: reserved by the allocator</span>}
        {drawn != null && <span class="legend">dashed: the limit, less the context</span>}
        <p id="reading" aria-live="polite">{say(point, curve)}{at === curve.peak && <b> (the peak)</b>}</p>
      </figcaption>
      <Lanes curve={curve} at={at} x={x} />
    </figure>
  );
}

const LANE = 40;

// What is alive of each stream's allocations, below the same events: the allocator never gives one
// stream's memory to another.
function Lanes({ curve, at, x }: { curve: Curve; at: number; x: (event: number) => number }) {
  const { streams, points } = curve;
  if (streams.length < 2) {
    return (
      <p class="soft small lanes" id="streams">
        {streams.length ? "All of it is allocated on one stream, on which the device computes." :
          "A CPU has no streams: its operators run one after the other."}
      </p>
    );
  }
  return (
    <div class="lanes" id="streams">
      <h3>By stream: what each one's allocations hold; memory of one is never given to another</h3>
      {streams.map((stream, index) => {
        const most = Math.max(...points.map((p) => p[7][index]!), 1);
        const y = (n: number) => LANE * (1 - n / most);
        const line = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[7][index]!).toFixed(1)}`);
        return (
          <div class="lane">
            <p class="small">
              <b>{nameOf(stream)}</b>, at most {show.bytes(most)}; here {show.bytes(points[at]![7][index])}
            </p>
            <svg viewBox={`0 0 ${W} ${LANE}`} preserveAspectRatio="none" role="img"
              aria-label={`${nameOf(stream)}: at most ${show.bytes(most)}`}>
              <polygon class={stream[0] ? "comm" : "comp"} points={`0,${LANE} ${line.join(" ")} ${W},${LANE}`} />
              <line class="hair" x1={x(points[at]![0])} x2={x(points[at]![0])} y1="0" y2={LANE} />
            </svg>
          </div>
        );
      })}
    </div>
  );
}

function nameOf([number, kinds]: Stream): string {
  const held = kinds.slice(0, 2).map((kind) => kind.replace("_", " ")).join(", ");
  return number ? `stream ${number} (${held})` : "computing (the default stream)";
}

function say(point: Point, curve: Curve): string {
  const [event, total, phase, what, where, reserved, kinds] = point;
  const held = curve.kinds.map((kind, i) => (kinds[i] ? `${kind.replace("_", " ")} ${show.bytes(kinds[i])}` : ""));
  const parts = [
    `event ${show.whole(event)}, ${curve.strings[phase]}: ${curve.strings[what]}`,
    `tensors ${show.bytes(total)}${reserved == null ? "" : `, reserved ${show.bytes(reserved)}`}`,
    held.filter(Boolean).join(", "),
    curve.strings[where] ?? "",
  ];
  return parts.filter(Boolean).join("; ");
}

function Phases({ curve, words }: { curve: Curve; words: Words }) {
  return (
    <div class="phases" aria-hidden="true">
      {curve.stretches.map(([phase, from, to]) => {
        const [left, width] = [(from / curve.events) * 100, ((to - from) / curve.events) * 100];
        return width < 6 ? null : (
          <span style={{ left: `${left}%`, width: `${width}%` }}><i>{words.phases[phase] ?? phase}</i></span>
        );
      })}
    </div>
  );
}

// One polygon a kind, each on what lies below it.
function areas(curve: Curve, x: (n: number) => number, y: (n: number) => number): [string, string][] {
  let below = curve.points.map(() => 0);
  return curve.kinds.map((kind, index) => {
    const above = curve.points.map((p, i) => below[i]! + p[6][index]!);
    const spot = (values: number[]) => curve.points.map((p, i) => `${x(p[0]).toFixed(1)},${y(values[i]!).toFixed(1)}`);
    const points = [...spot(above), ...spot(below).reverse()].join(" ");
    below = above;
    return [kind, points];
  });
}
