// Runs of this machine: what was predicted against what is measured, as it goes and afterwards.
import { useRef, useState } from "preact/hooks";
import { ask } from "./ask";
import { Lines } from "./charts";
import { Card, Figure, Name, Reconnecting, Table, Verdict } from "./parts";
import { usePolling } from "./poll";
import * as show from "./show";
import type { Keys } from "./state";
import type { Answered, Comparison, LogRow, RunRow, RunView, Words } from "./types";

const EVERY = 2000; // ms between two looks at a run that goes on
const NEW = 4000; // and at the list, in which new runs appear

export function RunScreen({ keys, set, words }: { keys: Keys; set: (keys: Keys) => void; words: Words }) {
  const [rows, setRows] = useState<RunRow[] | null>(null);
  const polled = usePolling(async (still) => {
    const { data } = await ask<RunRow[]>("runs", false);
    if (still()) setRows(data);
    return NEW;
  }, "");
  const chosen = readNames(keys._runs ?? "");
  const toggle = (name: string) => {
    const next = chosen.includes(name) ? chosen.filter((n) => n !== name) : [...chosen, name];
    set({ ...keys, _runs: writeNames(next) });
  };
  if (!rows && polled.error) return <Reconnecting polled={polled} />;
  if (!rows) return <p role="status" class="soft">reading the runs…</p>;
  if (!rows.length) {
    return (
      <Card title="No runs yet">
        <p role="status">
          Runs appear here once there is a plan in the folder that <code>memfit ui --runs</code> names, such as
          by <code>memfit train request.yaml</code>.
        </p>
      </Card>
    );
  }
  return (
    <div class="answer">
      <Reconnecting polled={polled} />
      <Card title="Runs">
        <Table label="Runs" rows={rows} mark={(row) => chosen.includes(row.name)} columns={[
          { head: "run", cell: (row) => (
            <label class="choice">
              <input type="checkbox" checked={chosen.includes(row.name)} onChange={() => toggle(row.name)} />
              {row.name}
            </label>
          ) },
          { head: "what", cell: (row) => (row.because ? <span class="does_not_fit">{row.because}</span> : row.title) },
          { head: "steps", number: true, cell: (row) => `${row.steps_done} of ${row.steps}${howFar(row)}` },
          { head: "predicted", number: true, cell: (row) => show.quantity(row.predicted, "bytes") },
          { head: "certified", number: true, cell: (row) => show.quantity(row.certified, "bytes") },
          { head: "measured", number: true, cell: (row) => show.quantity(row.measured, "bytes") },
          { head: "tokens/s", number: true, cell: (row) => show.quantity(row.measured_rate, "") },
          { head: "loss", number: true, cell: (row) => (row.loss == null ? "-" : digits(row.loss)) },
        ]} />
      </Card>
      {chosen.length === 0 && <p role="status" class="soft">Tick one run to see it, several to compare them.</p>}
      {chosen.length > 0 && <Followed names={chosen} words={words} key={chosen.join()} />}
    </div>
  );
}

const digits = (n: number): string => String(Number(n.toPrecision(4)));

// What only some steps tell, each drawn where two of them do.
const LEARNED: { key: keyof LogRow; title: string; say: (n: number) => string }[] = [
  { key: "evaluation_loss", title: "Loss of held-out data", say: digits },
  { key: "reward", title: "Mean reward of sampled answers", say: digits },
  { key: "evaluation_reward", title: "Mean reward of held-out prompts", say: digits },
  { key: "kl", title: "Divergence from the reference, nats a token", say: digits },
  { key: "length", title: "Mean length of answers, tokens", say: digits },
  { key: "reward_accuracy", title: "Share of pairs in which the preferred answer is likelier", say: digits },
];

// Names in one key of the address, parted by commas, each coded so that it may have commas itself.
function readNames(text: string): string[] {
  return text.split(",").filter(Boolean).map((name) => {
    try {
      return decodeURIComponent(name);
    } catch {
      return name;
    }
  });
}

const writeNames = (names: string[]): string => names.map(encodeURIComponent).join(",");

interface Followed {
  view: RunView;
  log: LogRow[];
}

function Followed({ names, words }: { names: string[]; words: Words }) {
  const [runs, setRuns] = useState<Record<string, Followed>>({});
  const held = useRef<Record<string, Followed>>({});
  const polled = usePolling(async (still) => {
    for (const name of names) {
      const log = held.current[name]?.log ?? [];
      const after = log.at(-1)?.step ?? 0;
      const query = new URLSearchParams({ name, after: String(after) });
      const { data } = await ask<RunView>(`run?${query}`, false);
      held.current[name] = { view: data, log: [...log, ...data.log] };
    }
    if (still()) setRuns({ ...held.current });
    return Object.values(held.current).some((f) => !f.view.report.run?.finished) ? EVERY : null;
  }, "");
  const found = names.filter((name) => runs[name]);
  if (!found.length && polled.error) return <Reconnecting polled={polled} />;
  if (!found.length) return <p role="status" class="soft">reading…</p>;
  const lines = (read: (row: LogRow) => number | null | undefined) =>
    found.map((name, style) => ({
      name, style,
      points: runs[name]!.log.flatMap((row): [number, number][] => {
        const value = read(row);
        return value == null || !Number.isFinite(value) ? [] : [[row.step, value]];
      }),
    }));
  const one = runs[found[0]!]!;
  return (
    <>
      <Reconnecting polled={polled} />
      {found.length === 1 && <Distance name={found[0]!} run={one} words={words} />}
      <Card title="As it goes">
        <Lines title="Memory: the peak of each step so far" zero say={show.bytes} ticks={show.byteTicks}
          lines={lines((row) => row.memory_peak_allocated)}
          marks={found.length === 1 ? limits(one) : []} />
        <Lines title="Tokens a second" zero say={show.whole} lines={lines((row) => row.tokens_per_second)}
          marks={found.length === 1 ? rate(one) : []} />
        <Lines title="Loss" say={digits} lines={lines((row) => row.loss)} />
        {LEARNED.map(({ key, title, say }) => {
          const drawn = lines((row) => row[key]).filter((line) => line.points.length > 1);
          return drawn.length > 0 && <Lines title={title} say={say} lines={drawn} />;
        })}
      </Card>
      {found.length === 1 && <Answers rows={one.view.report.run?.answers ?? []} />}
      {found.map((name) => <Compared name={name} rows={runs[name]!.view.report.comparisons} />)}
    </>
  );
}

const figure = (run: Followed, name: string): Comparison | undefined =>
  run.view.report.comparisons.find((c) => c.name === name);

function limits(run: Followed): { name: string; value: number }[] {
  const peak = figure(run, "memory.peak_allocated");
  const memory = (run.view.report.certificate ?? run.view.report.plan).memory;
  const limit = memory.device_total == null ? memory.usable : null;
  const found = [
    { name: "predicted", value: peak?.predicted ?? null },
    { name: "certified", value: peak?.certified ?? null },
    { name: "limit", value: limit != null && limit < 4 * (peak?.certified ?? limit) ? limit : null },
  ];
  return found.filter((mark): mark is { name: string; value: number } => mark.value != null);
}

function rate(run: Followed): { name: string; value: number }[] {
  const value = figure(run, "time.tokens_per_second")?.predicted;
  return value == null ? [] : [{ name: "predicted", value }];
}

function Distance({ name, run, words }: { name: string; run: Followed; words: Words }) {
  const { report } = run.view;
  const memory = (report.certificate ?? report.plan).memory;
  const total = figure(run, "memory.device_total")?.measured ?? null;
  const live = Math.max(0, ...run.log.map((row) => row.memory_peak_allocated ?? 0)) || null;
  const measured = memory.device_total == null ? (live ?? figure(run, "memory.peak_allocated")?.measured ?? null) : total;
  const left = memory.usable == null || measured == null ? null : memory.usable - measured;
  const last = run.log.at(-1);
  return (
    <>
      <p role="status" class="headline">
        <Verdict memory={memory} words={words} />
        <span>
          {name}: step {last?.step ?? report.run?.steps_done ?? 0} of {report.plan.recipe.steps}
          {report.run?.finished ? `, finished${early(report.run.ended_early)}` : ""}
        </span>
      </p>
      <div class="figures">
        <Figure value={measured == null ? "not measured" : show.bytes(measured)} what="measured" />
        <Figure value={show.bytes(memory.usable)} what="may be used" />
        <Figure value={left == null ? "unknown" : `${show.bytes(Math.abs(left))} ${left < 0 ? "too much" : "left"}`} what="distance to the limit" />
        <Figure value={last?.loss == null ? "-" : digits(last.loss)} what="loss" />
      </div>
      {(report.run?.warnings.length ?? 0) > 0 && (
        <Card title="Warnings"><ul>{report.run!.warnings.map((line) => <li>{line}</li>)}</ul></Card>
      )}
    </>
  );
}

const howFar = (row: RunRow): string =>
  row.finished ? (row.ended_early ? ", ended early" : "") : ", going or stopped";

const early = (why: string): string => (why ? ` early: ${why}` : "");

function Answers({ rows }: { rows: Answered[] }) {
  if (!rows.length) return null;
  return (
    <Card title="Sampled answers">
      <Table label="Sampled answers" rows={rows} columns={[
        { head: "step", number: true, cell: (row) => String(row.step) },
        { head: "prompt", cell: (row) => <span class="said">{row.prompt}</span> },
        { head: "answer", cell: (row) => <span class="said">{row.completion}</span> },
        { head: "reward", number: true, cell: (row) => (row.reward == null ? "-" : digits(row.reward)) },
      ]} />
    </Card>
  );
}

function Compared({ name, rows }: { name: string; rows: Comparison[] }) {
  return (
    <Card title={`${name}: predicted, certified, measured`}>
      <Table label={`Comparisons of ${name}`} rows={rows} columns={[
        { head: "figure", cell: (c) => <Name text={c.name} /> },
        { head: "predicted", number: true, cell: (c) => show.quantity(c.predicted, c.unit) },
        { head: "certified", number: true, cell: (c) => show.quantity(c.certified, c.unit) },
        { head: "measured", number: true, cell: (c) => show.quantity(c.measured, c.unit) },
        { head: "error of prediction", number: true, cell: (c) => show.signed(c.error_predicted) },
        { head: "error of certificate", number: true, cell: (c) => show.signed(c.error_certified) },
      ]} />
    </Card>
  );
}
