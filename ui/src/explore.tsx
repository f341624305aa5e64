// What else there is: other configurations, other devices, why not this one, two side by side.
import { useEffect, useState } from "preact/hooks";
import { ask } from "./ask";
import { Scatter, type Dot } from "./charts";
import { Text } from "./controls";
import { Card, Table, Trouble, Verdict, room } from "./parts";
import type { Planned } from "./plan";
import * as show from "./show";
import { asYaml, change, queryOf, writeState, type Keys } from "./state";
import { Beside, SIDES, TwoPlans, writeChanges } from "./two";
import type { Considered, Offered, Offers, Plan, WhyNot, Words } from "./types";

interface Props {
  keys: Keys;
  set: (keys: Keys) => void;
  planned: Planned;
  words: Words;
}

export function ExploreScreen(props: Props) {
  const { planned } = props;
  return (
    <div class="answer" aria-busy={planned.busy}>
      {planned.error ? <Trouble error={planned.error} /> : planned.answer ? (
        <Found {...props} plan={planned.answer.data} />
      ) : <p role="status" class="soft">planning…</p>}
      <TwoPlans keys={props.keys} set={props.set} words={props.words} />
      <OffersCard {...props} />
      <WhyNotCard {...props} />
    </div>
  );
}

interface Row extends Considered {
  from: "considered" | "lever";
}

const size = (row: Considered) => row.device_total ?? row.peak_allocated;
const words = (row: Considered) =>
  Object.entries(row.changes).map(([key, value]) => `${key}=${asYaml(value)}`).join(" ");

function Found(props: Props & { plan: Plan }) {
  const { plan, keys, set } = props;
  const fitting = keys._fits === "1";
  const filter = (keys._filter ?? "").toLowerCase();
  const all: Row[] = [
    ...plan.considered.map((row) => ({ ...row, from: "considered" as const })),
    ...plan.levers.map((row) => ({ ...row, from: "lever" as const })),
  ];
  const rows = all
    .filter((row) => !fitting || row.fits)
    .filter((row) => `${row.label} ${words(row)} ${row.because}`.toLowerCase().includes(filter))
    .sort((a, b) => a.relative_time - b.relative_time);
  const step = plan.time.step_seconds;
  const seconds = (row: Row) => (step == null ? row.relative_time : step * row.relative_time);
  const front = frontOf(rows.filter((row) => row.fits), seconds, size);
  const dots: Dot[] = rows.map((row) => ({
    x: seconds(row), y: size(row), name: row.chosen ? "chosen" : row.label + (words(row) && ` (${words(row)})`),
    shape: row.chosen ? "chosen" : row.fits ? "fits" : "not", front: front.has(row), label: row.chosen ? "chosen" : undefined,
  }));
  return (
    <>
      <p role="status" class="headline">
        {props.planned.busy ? <span class="soft">planning…</span> : (
          <>
            <Verdict memory={plan.memory} words={props.words} />
            <span>{plan.recipe.model.name} on {plan.recipe.device} {room(plan.memory)}</span>
          </>
        )}
      </p>
      <Card title="Memory against time">
        <Scatter dots={dots} limit={plan.memory.usable} x={step == null ? "time, relative" : "one step"}
          y="needs" showX={step == null ? show.few : show.seconds} showY={show.bytes} />
      </Card>
      <Card title="Considered">
        <div class="row filters">
          <Text id="filter" label="Only rows with" value={keys._filter ?? ""} example="micro-batch 8"
            set={(value) => set({ ...keys, _filter: value })} />
          <label class="choice">
            <input type="checkbox" id="only-fits" checked={fitting}
              onChange={(event) => set({ ...keys, _fits: event.currentTarget.checked ? "1" : "" })} />
            only what fits
          </label>
        </div>
        <Table label="Considered" rows={rows} mark={(row) => row.chosen} columns={[
          { head: "", cell: (row) => (row.chosen ? "✔" : "") },
          { head: "recipe", cell: (row) => (
            <>
              {row.label}
              {words(row) && <><br /><a href={writeState({ screen: "plan", keys: change(keys, row.changes) })}>
                {words(row)}</a></>}
            </>
          ) },
          { head: "front", cell: (row) => (front.has(row) ? "●" : "") },
          { head: "needs", number: true, cell: (row) => `${row.exact ? "" : "~"}${show.bytes(size(row))}` },
          { head: "time", number: true, cell: (row) => `${row.relative_time.toFixed(2)}x` },
          { head: "fits", cell: (row) => (row.fits ? "✔\u00a0yes" : "✘\u00a0no") },
          { head: "beside", cell: (row) => (row.chosen || words(row)) && (
            <Sides text={row.chosen ? "" : writeChanges(row.changes)} keys={keys} set={set} />
          ) },
          { head: "why, or why not", cell: (row) => row.because },
        ]} />
        <p class="soft small">
          Beside: left and right of the two plans below. ● on the front: nothing that fits is faster with less memory. ~ the search's estimate, within a few per cent.
        </p>
      </Card>
    </>
  );
}

// Which of the two plans below a row is; one stop of Tab a side, arrows go through the rows.
function Sides({ text, keys, set }: { text: string; keys: Keys; set: (keys: Keys) => void }) {
  return (
    <span class="sides">
      {SIDES.map((side, index) => (
        <input type="radio" name={side} checked={(keys[side] ?? "") === text}
          aria-label={`${text || "as asked"}, ${index ? "right" : "left"}`}
          onChange={() => set({ ...keys, [side]: text })} />
      ))}
    </span>
  );
}

// Rows that no other is below in both figures.
function frontOf<T>(rows: T[], x: (row: T) => number, y: (row: T) => number): Set<T> {
  const found = new Set<T>();
  let least = Infinity;
  for (const row of [...rows].sort((a, b) => x(a) - x(b) || y(a) - y(b))) {
    if (y(row) < least) {
      least = y(row);
      found.add(row);
    }
  }
  return found;
}

function OffersCard({ keys, set, words: said }: Props) {
  const offers = keys._offers ?? "";
  const objective = keys._objective ?? "fastest";
  const [found, setFound] = useState<Offers | null>(null);
  const [error, setError] = useState<unknown>(null);
  const query = offers && queryOf({ ...keys, "hardware.device": "", "hardware.count": "" },
    { devices: offers, objective });
  useEffect(() => {
    setFound(null);
    setError(null);
    if (!query) return;
    let still = true;
    ask<Offers>(`compare?${query}`).then((a) => still && setFound(a.data), (e) => still && setError(e));
    return () => { still = false; };
  }, [query]);
  const dots: Dot[] = (found?.rows ?? [])
    .filter((row) => row.total_seconds != null && row.usd != null)
    .map((row) => ({ x: row.total_seconds!, y: row.usd!, name: nameOf(row), front: false,
      label: row.best ? nameOf(row) : undefined, shape: row.best ? "chosen" : row.verdict === "fits" ? "fits" : "not" }));
  const front = frontOf(dots.filter((dot) => dot.shape !== "not"), (d) => d.x, (d) => d.y);
  dots.forEach((dot) => { dot.front = front.has(dot); });
  return (
    <Card title="Other devices: time against money">
      <div class="row filters">
        <Text id="offers" label="Devices to compare" value={offers} example="h100-sxm,a100-sxm-80,rtx-4090"
          set={(value) => set({ ...keys, _offers: value })} />
        <label>
          The best is
          <select value={objective} id="objective-offers"
            onChange={(event) => set({ ...keys, _objective: event.currentTarget.value })}>
            <option value="fastest">the fastest</option>
            <option value="cheapest">the cheapest</option>
            <option value="fewest-devices">the fewest devices</option>
          </select>
        </label>
      </div>
      {error ? <Trouble error={error} /> : query && !found && <p role="status" class="soft">comparing…</p>}
      {found && (
        <>
          {dots.length > 1 && <Scatter dots={dots} limit={null} x="whole run" y="cost" showX={show.seconds} showY={show.usd} />}
          <Table label="Offers" rows={found.rows} mark={(row) => row.best} columns={[
            { head: "", cell: (row) => (row.best ? "✔" : "") },
            { head: "devices", cell: nameOf },
            { head: "verdict", cell: (row) => said.verdicts[row.verdict] ?? "REFUSED" },
            { head: "needs", number: true, cell: (row) => show.bytes(row.needs) },
            { head: "run", number: true, cell: (row) => show.seconds(row.total_seconds) },
            { head: "cost", number: true, cell: (row) => show.usd(row.usd) },
            { head: "why, or why not", cell: (row) => row.because },
          ]} />
        </>
      )}
    </Card>
  );
}

const nameOf = (row: Offered) => `${row.offer.count} x ${row.offer.device}`;

function WhyNotCard({ keys, set, words: said }: Props) {
  const asked = keys._why_not ?? "";
  const [found, setFound] = useState<WhyNot | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [key, ...value] = asked.split("=");
  const query = asked && queryOf(keys, { [`why_not.${key}`]: value.join("=") });
  useEffect(() => {
    setFound(null);
    setError(null);
    if (!query) return;
    let still = true;
    ask<WhyNot>(`why_not?${query}`).then((a) => still && setFound(a.data), (e) => still && setError(e));
    return () => { still = false; };
  }, [query]);
  const both = found ? [found.chosen, found.requested].filter((plan) => plan != null) : [];
  return (
    <Card title="Why not?">
      <Text id="why-not" label="Instead of the chosen one" value={asked} example="micro_batch=8"
        set={(value) => set({ ...keys, _why_not: value })} />
      {error ? <Trouble error={error} /> : query && !found && <p role="status" class="soft">planning both…</p>}
      {found && (
        <>
          <p role="status" id="why-answer">
            <b>{found.answer.replaceAll("_", " ")}</b>: {found.because.join("; ")}
          </p>
          <Beside plans={both} names={["chosen", asked]} bars={["chosen", "asked"]} words={said} label="Chosen and asked" />
        </>
      )}
    </Card>
  );
}
