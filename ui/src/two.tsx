// Two plans side by side: each is the request with what is written for it changed.
import { Refused } from "./ask";
import { useDraft } from "./draft";
import { Text } from "./controls";
import { Bar, Card, Table, Trouble, partsOf } from "./parts";
import * as show from "./show";
import { asYaml, change, command, queryOf, type Keys } from "./state";
import type { Plan, Words } from "./types";
import { needs } from "./types";

export const SIDES = ["_left", "_right"] as const;
export type Side = (typeof SIDES)[number];

// As the address has it: `key=value; key=value`.
export function writeChanges(changes: Record<string, unknown>): string {
  return Object.entries(changes).map(([key, value]) => `${key}=${asYaml(value)}`).join("; ");
}

function readChanges(text: string): Keys {
  const parts = text.split(";").map((part) => part.trim()).filter(Boolean);
  return Object.fromEntries(parts.map((part) => {
    const at = part.indexOf("=");
    if (at < 1) throw new Refused(0, `cannot read \`${part}\``, "write a key and its value: `micro_batch=4; loss=chunked`");
    return [part.slice(0, at).trim(), part.slice(at + 1).trim()];
  }));
}

interface Asked {
  keys: Keys | null; // null: what is written cannot be read
  plan: Plan | null;
  error: unknown;
}

function usePlanWith(keys: Keys, text: string, on: boolean): Asked {
  let own: Keys | null = null;
  let unread: unknown = null;
  try {
    own = change(keys, readChanges(text));
  } catch (error) {
    unread = error;
  }
  const query = on && own ? queryOf(own) : "";
  const asked = useDraft(query);
  return { keys: own, plan: asked.plan, error: unread ?? asked.error };
}

export function TwoPlans({ keys, set, words }: { keys: Keys; set: (keys: Keys) => void; words: Words }) {
  const [left, right] = SIDES.map((side) => keys[side] ?? "") as [string, string];
  const on = left !== right;
  const asked = [usePlanWith(keys, left, on), usePlanWith(keys, right, on)];
  const names = [left, right].map((text) => text || "as asked");
  const plans = asked.flatMap(({ plan }) => (plan ? [plan] : []));
  return (
    <Card title="Two plans side by side" id="two">
      <p class="soft small">
        Each is what was asked with keys of its own; empty is what was asked. The rows above with a key set fill them in, and
        any key may be written, <code>model</code> and <code>hardware.device</code> too.
      </p>
      <div class="row filters">
        {SIDES.map((side, index) => (
          <Text id={`two${side}`} label={index ? "Right" : "Left"} value={keys[side] ?? ""}
            example={index ? "hardware.device=a100-sxm-80; method=lora" : "as asked"}
            set={(value) => set({ ...keys, [side]: value })} />
        ))}
      </div>
      {on && asked.map(({ error }) => (error ? <Trouble error={error} /> : null))}
      {on && plans.length < 2 && !asked.some(({ error }) => error) && <p role="status" class="soft">planning both…</p>}
      {on && plans.length === 2 && (
        <>
          <Beside plans={plans} names={names} bars={["left", "right"]} words={words} label="Left and right" />
          <Table label="Keys that differ" rows={differing(plans)} columns={[
            { head: "key of the recipe", cell: ([key]) => <code>{key}</code> },
            ...names.map((name, index) => ({ head: name, cell: (row: string[]) => row[index + 1] })),
          ]} />
          {asked.map((one) => <pre>{command(one.keys!)}</pre>)}
        </>
      )}
    </Card>
  );
}

type Read = (plan: Plan) => number | null | undefined;

// The bars of two plans on one scale, and their figures with what the second has more.
export function Beside({ plans, names, bars, words, label }: {
  plans: Plan[];
  names: string[];
  bars: string[]; // shorter names
  words: Words;
  label: string;
}) {
  const order = Object.keys(words.colours);
  const parts = plans.map((plan) => partsOf(plan.memory, order));
  const full = Math.max(...plans.map((plan) => Math.max(needs(plan.memory) ?? 0, plan.memory.usable ?? 0)), 1);
  const kinds = order.filter((kind) => parts.some((own) => own.some((part) => part.kind === kind)));
  const of = (kind: string): Read => (plan) =>
    parts[plans.indexOf(plan)]!.find((part) => part.kind === kind)?.nbytes ?? 0;
  const figures: [string, Read, (n: number | null | undefined) => string][] = [
    ["needs", (plan) => needs(plan.memory), show.bytes],
    ...kinds.map((kind): [string, Read, typeof show.bytes] => [`– ${kind.replace("_", " ")}`, of(kind), show.bytes]),
    ["may be used", (plan) => plan.memory.usable, show.bytes],
    ["one step", (plan) => plan.time.step_seconds, show.seconds],
    ["tokens a second", (plan) => plan.time.tokens_per_second, show.whole],
    ["whole run", (plan) => plan.time.total_seconds, show.seconds],
    ["cost", (plan) => plan.cost.usd, show.usd],
  ];
  const texts: [string, (plan: Plan) => string][] = [
    ["verdict", (plan) => words.verdicts[plan.memory.verdict] ?? plan.memory.verdict],
    ["model and device", (plan) => `${plan.recipe.model.name} on ${plan.recipe.device}`],
    ["recipe", (plan) => plan.considered.find((row) => row.chosen)?.label ?? plan.recipe_digest],
  ];
  const rows = [
    ...texts.map(([name, read]) => [name, ...plans.map(read), ""]),
    ...figures.map(([name, read, say]) => [name, ...plans.map((plan) => say(read(plan))), more(plans.map(read), say)]),
  ];
  return (
    <>
      <div class="bars">
        {plans.map((plan, index) => (
          <Bar name={bars[index]!} parts={parts[index]!} limit={plan.memory.usable} full={full} words={words} />
        ))}
      </div>
      <Table label={label} rows={rows} columns={[
        { head: "figure", cell: (row) => row[0] },
        ...names.map((name, index) => ({ head: name, cell: (row: string[]) => row[index + 1] })),
        { head: "the second has", number: true, cell: (row) => row.at(-1) },
      ]} />
    </>
  );
}

function more([one, two]: (number | null | undefined)[], say: (n: number) => string): string {
  if (one == null || two == null) return "";
  if (one === two) return "the same";
  if (say(one) === say(two)) return "about the same";
  return `${say(Math.abs(two - one))} ${two > one ? "more" : "less"}`;
}

// Of the recipes' keys, those whose values are not the same; of the model its name alone.
function differing(plans: Plan[]): string[][] {
  const flat = plans.map((plan) => leaves({ ...plan.recipe, model: plan.recipe.model.name }));
  const keys = [...new Set(flat.flatMap((own) => Object.keys(own)))];
  return keys.map((key) => [key, ...flat.map((own) => own[key] ?? "")]).filter(([, one, two]) => one !== two);
}

function leaves(value: unknown, path = ""): Record<string, string> {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { [path]: asYaml(value) };
  const inner = Object.entries(value).map(([key, item]) => leaves(item, path ? `${path}.${key}` : key));
  return Object.assign({}, ...inner);
}
