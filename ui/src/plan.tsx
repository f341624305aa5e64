// The plan: does it fit, what takes the memory and why, how long and how dear, what else there is.
import { useState } from "preact/hooks";
import type { Answer } from "./ask";
import { Bar, Card, Copy, Figure, Reasons, Table, Trouble, Verdict, download, partsOf, rangeOf, room } from "./parts";
import * as show from "./show";
import type { Keys } from "./state";
import { asYaml, change, command, writeState } from "./state";
import type { Considered, Plan, Words } from "./types";
import { needs } from "./types";

export interface Planned {
  answer: Answer<Plan> | null;
  error: unknown;
  full: boolean; // with its levers
  busy: boolean;
}

export function PlanScreen(props: { keys: Keys; planned: Planned; words: Words }) {
  const { answer, error, busy } = props.planned;
  return (
    <div class="answer" aria-busy={busy}>
      <p role="status" class="headline" id="verdict">
        {error ? <span class="verdict refused">NO PLAN</span> : answer && <Headline plan={answer.data} words={props.words} />}
        {!answer && !error && <span class="soft">planning…</span>}
      </p>
      {error ? <Trouble error={error} /> : answer && <Whole {...props} answer={answer} />}
    </div>
  );
}

function Headline({ plan, words }: { plan: Plan; words: Words }) {
  return (
    <>
      <Verdict memory={plan.memory} words={words} />
      <span>
        {plan.recipe.model.name} on {plan.recipe.device} {room(plan.memory)}
      </span>
    </>
  );
}

function Whole(props: { keys: Keys; planned: Planned; words: Words; answer: Answer<Plan> }) {
  const { words, keys, answer } = props;
  const plan = answer.data;
  const [open, setOpen] = useState<string | null>(null);
  const parts = partsOf(plan.memory, Object.keys(words.colours));
  const chosen = plan.considered.find((row) => row.chosen);
  const mesh = show.mesh(plan.recipe.parallel);
  return (
    <>
      {plan.memory.verdict === "does_not_fit" && <WaysOut plan={plan} keys={keys} full={props.planned.full} />}
      <Card title="Memory at the peak">
        <div class="bars">
          <Bar name={mesh ? "fullest device" : "device"} parts={parts} limit={plan.memory.usable}
            range={rangeOf(plan.memory)} words={words} onPick={setOpen} />
        </div>
        <p class="soft small">
          The line is what may be used{rangeOf(plan.memory) && "; the bracket below the bar is the range of the prediction"}. {chosen && `Chosen: ${chosen.label}${mesh && ` on ${mesh}`}. `}
          Open a kind to read why.
        </p>
        <Reasons parts={parts} words={words} open={open} onToggle={setOpen} />
        <p class="soft small">limit: {plan.memory.because}</p>
      </Card>
      {plan.memory.verdict !== "does_not_fit" && <Seconds plan={plan} />}
      {plan.memory.verdict === "at_risk" && plan.ways_out.length > 0 && <WaysOut plan={plan} keys={keys} full />}
      <Instants plan={plan} words={words} />
      <Card title="Levers: one knob set, planned again">
        {plan.levers.length ? <Levers plan={plan} keys={keys} rows={plan.levers} /> : (
          <p class="soft">
            {props.planned.full ? "No single knob is left to turn." : "being worked out…"}
          </p>
        )}
      </Card>
      {plan.assumptions.length > 0 && (
        <Card title="Assumed">
          <ul>{plan.assumptions.map((line) => <li>{line}</li>)}</ul>
        </Card>
      )}
      <Card title="Take it with you">
        <p class="actions">
          <button type="button" id="download" class="main" disabled={!props.planned.full}
            onClick={() => download("plan.json", answer.text)}>
            Download plan.json
          </button>{" "}
          <Copy text={command(keys)} label="Copy the command" />{" "}
          <Copy text={location.href} label="Copy the link" />
        </p>
        <pre id="command">{[command(keys), ...further(plan, keys)].join("\n")}</pre>
        <p class="soft small">recipe <code>{plan.recipe_digest}</code>; answered in {answer.ms.toFixed(0)} ms</p>
      </Card>
    </>
  );
}

// What the terminal says to type next: a proof of memfit's own step, the files of another's.
function further(plan: Plan, keys: Keys): string[] {
  if (plan.memory.verdict === "does_not_fit") return [];
  return [plan.recipe.framework === "memfit" ? command(keys, "certify") : `${command(keys, "predict")} --why`];
}

// What makes it fit: each was planned by the server as the link asks for it.
function WaysOut({ plan, keys, full }: { plan: Plan; keys: Keys; full: boolean }) {
  const { ways_out: ways } = plan;
  return (
    <Card title="Ways out: what does fit" id="ways-out">
      {!full ? <p role="status" class="soft">being worked out…</p> : !ways.length ? (
        <p>
          None was found among other methods, more devices and larger devices. A smaller model or shorter
          sequences need less; <a href={writeState({ screen: "explore", keys })}>Explore</a> has what was tried.
        </p>
      ) : (
        <Table label="Ways out" rows={ways} columns={[
          { head: "apply", cell: (way) => (
            <a class="way" href={writeState({ screen: "plan", keys: change(keys, way.changes) })}>{way.title}</a>
          ) },
          { head: "needs", number: true, cell: (way) => show.bytes(way.device_total ?? way.peak_allocated) },
          { head: "all steps", number: true, cell: (way) => show.seconds(way.total_seconds) },
          { head: "cost", number: true, cell: (way) => show.usd(way.usd) },
          { head: "note", cell: (way) => `${way.because}${way.exact ? "" : "; changes what is learned"}` },
        ]} />
      )}
    </Card>
  );
}

function Seconds({ plan }: { plan: Plan }) {
  const { time, cost, recipe } = plan;
  return (
    <Card title="Time and money (predicted)">
      <div class="figures">
        <Figure value={show.seconds(time.step_seconds)} what="one step" id="step-seconds" />
        <Figure value={show.whole(time.tokens_per_second)} what="tokens a second" id="tokens-per-second" />
        <Figure value={show.share(time.mfu)} what="MFU" />
        <Figure value={show.seconds(time.total_seconds)}
          what={recipe.steps ? `all ${show.whole(recipe.steps)} steps` : "all steps"} id="total-seconds" />
        <Figure value={show.few(cost.device_hours)} what="device-hours" />
        <Figure value={show.usd(cost.usd)} what="cost" id="usd" />
        <Figure value={cost.kwh == null ? show.UNKNOWN : `${show.few(cost.kwh)} kWh`} what="energy" />
      </div>
      <p class="soft small">because {time.because}; {cost.because}</p>
      {!!time.phases?.length && (
        <Table label="Phases of an iteration" rows={time.phases} columns={[
          { head: "phase", cell: (row) => row.phase },
          { head: "seconds", number: true, cell: (row) => show.seconds(row.seconds) },
          { head: "from", number: true, cell: (row) => show.seconds(row.seconds_low) },
          { head: "to", number: true, cell: (row) => show.seconds(row.seconds_high) },
          { head: "tokens/s", number: true, cell: (row) => row.tokens_per_second == null ? "" : show.whole(row.tokens_per_second) },
          { head: "because", cell: (row) => row.because },
        ]} />
      )}
    </Card>
  );
}

// The peak of each phase on one scale.
export function Instants({ plan, words }: { plan: Plan; words: Words }) {
  const peaks = new Map<string, number>();
  for (const entry of plan.ledger.entries) {
    peaks.set(entry.phase, (peaks.get(entry.phase) ?? 0) + entry.nbytes);
  }
  const full = Math.max(...peaks.values(), 1);
  const rows = Object.keys(words.phases).filter((phase) => peaks.has(phase));
  if (!rows.length) return null;
  return (
    <Card title="Instants: the peak of each phase">
      <div class="thin">
        {rows.map((phase) => (
          <div class="bar">
            <span class="barname">
              {words.phases[phase]}
              {phase === plan.memory.peak_phase && <b> (peak)</b>}
            </span>
            <svg class="strip" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">
              <rect width={(peaks.get(phase)! / full) * 1000} height="10" class="accent" />
            </svg>
            <span class="n">{show.bytes(peaks.get(phase))}</span>
          </div>
        ))}
      </div>
    </Card>
  );
}

function Levers({ plan, keys, rows }: { plan: Plan; keys: Keys; rows: Considered[] }) {
  const own = needs(plan.memory) ?? 0;
  const size = (row: Considered) => row.device_total ?? row.peak_allocated;
  const saved = (row: Considered) => size(row) - own;
  return (
    <Table label="Levers" rows={[...rows].sort((a, b) => size(a) - size(b))} columns={[
      { head: "set", cell: (row) => (
        <a href={writeState({ screen: "plan", keys: change(keys, row.changes) })}>
          {Object.entries(row.changes).map(([key, value]) => `${key}=${asYaml(value)}`).join(" ")}
        </a>
      ) },
      { head: "memory", number: true, cell: (row) =>
        `${saved(row) > 0 ? "+" : saved(row) < 0 ? "-" : ""}${show.bytes(Math.abs(saved(row)))}` },
      { head: "time", number: true, cell: (row) => {
        const more = (row.relative_time - 1) * 100;
        return `${more >= 0 ? "+" : ""}${more.toFixed(1)}%`;
      } },
      { head: "fits", cell: (row) => (row.fits ? "✔\u00a0yes" : "✘\u00a0no") },
      { head: "note", cell: (row) => row.because },
    ]} />
  );
}
