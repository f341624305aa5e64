// Compute, tokens, money: move one, the others follow.
import { useEffect, useState } from "preact/hooks";
import { ask } from "./ask";
import { Devices, Text } from "./controls";
import { Card, Table, Trouble } from "./parts";
import * as show from "./show";
import type { Keys } from "./state";
import type { Budget, DeviceRow, Figure } from "./types";

interface Quantity {
  key: string;
  label: string;
  low: number; // powers of ten of the slider
  high: number;
  write: (n: number) => string;
  example: string;
}

const round = (n: number) => Number(n.toPrecision(2));
const QUANTITIES: Quantity[] = [
  { key: "parameters", label: "Parameters", low: 7, high: 12, write: (n) => show.count(round(n)), example: "7B" },
  { key: "tokens", label: "Tokens", low: 8, high: 14, write: (n) => show.count(round(n)), example: "140B" },
  { key: "compute", label: "Compute", low: 17, high: 26, write: (n) => `${round(n).toExponential()} FLOP`, example: "1e21 FLOP" },
  { key: "devices", label: "Devices", low: 0, high: 5, write: (n) => String(Math.round(round(n))), example: "8" },
  { key: "time", label: "Time", low: 3, high: 8, write: (n) => `${round(n / 3600)} h`, example: "30 d" },
  { key: "cost", label: "Money", low: 1, high: 8, write: (n) => `${round(n)} USD`, example: "5000 USD" },
];
const NOTCHES = 120;
const FIRST: Keys = { _b_parameters: "7B", _b_devices: "8", _b_device: "h100-sxm" };

export function BudgetScreen(props: { keys: Keys; set: (keys: Keys) => void; devices: DeviceRow[] }) {
  const own = Object.keys(props.keys).some((key) => key.startsWith("_b_"));
  const keys = own ? props.keys : { ...props.keys, ...FIRST };
  const [found, setFound] = useState<Budget | null>(null);
  const [error, setError] = useState<unknown>(null);
  const given = Object.fromEntries(
    Object.entries(keys).filter(([key, value]) => key.startsWith("_b_") && value).map(([k, v]) => [k.slice(3), v]),
  );
  const query = new URLSearchParams(given).toString();
  useEffect(() => {
    let still = true;
    ask<Budget>(`budget?${query}`).then(
      (answer) => still && (setFound(answer.data), setError(null)),
      (e) => still && setError(e),
    );
    return () => { still = false; };
  }, [query]);
  const put = (key: string, value: string) => props.set({ ...keys, [`_b_${key}`]: value });
  return (
    <div class="answer">
      <Card title="Given; the rest follows">
        <div class="budget">
          {QUANTITIES.map((q) => (
            <Row quantity={q} text={given[q.key] ?? ""} figure={found?.figures[q.key]} put={(v) => put(q.key, v)} />
          ))}
        </div>
        <div class="row filters">
          <Devices id="budget-device" rows={props.devices} value={given.device ?? ""} example="none" set={(v) => put("device", v)} />
          <Text id="mfu" label="MFU" value={given.mfu ?? ""} example="0.4" set={(v) => put("mfu", v)} />
          <Text id="price" label="Price of a device-hour" value={given.price ?? ""} example="2.50 USD"
            set={(v) => put("price", v)} />
        </div>
      </Card>
      {error ? <Trouble error={error} /> : found && <Answered found={found} />}
    </div>
  );
}

function Row(props: { quantity: Quantity; text: string; figure?: Figure; put: (text: string) => void }) {
  const { quantity: q, text, figure } = props;
  const value = figure?.value ?? null;
  const at = value == null || value <= 0 ? 0
    : Math.round(((Math.log10(value) - q.low) / (q.high - q.low)) * NOTCHES);
  const said = figureText(q.key, figure);
  const id = `budget-${q.key}`;
  return (
    <div class={text ? "slider given" : "slider"}>
      <Text id={`${id}-text`} label={q.label} value={text} example={said === show.UNKNOWN ? q.example : said} set={props.put} />
      <output for={`${id}-range`}>{text ? "given" : `follows: ${said}`}</output>
      <input id={`${id}-range`} type="range" min={0} max={NOTCHES} step={1} aria-label={`${q.label}, slider`}
        value={Math.min(NOTCHES, Math.max(0, at))} aria-valuetext={said}
        onInput={(event) => {
          const part = Number(event.currentTarget.value) / NOTCHES;
          props.put(q.write(10 ** (q.low + part * (q.high - q.low))));
        }} />
      <button type="button" disabled={!text} aria-label={`let ${q.label} follow`} onClick={() => {
        document.getElementById(`${id}-text`)?.focus(); // the button is disabled once there is nothing given
        props.put("");
      }}>×</button>
    </div>
  );
}

const COUNTS = new Set(["parameters", "tokens", "chinchilla_tokens", "chinchilla_parameters",
  "optimal_parameters", "optimal_tokens"]);

export function figureText(name: string, figure?: Figure): string {
  if (figure?.value == null) return show.UNKNOWN;
  const { value, unit } = figure;
  if (COUNTS.has(name)) return show.count(value);
  if (unit === "s") return show.seconds(value);
  if (unit === "USD") return `${show.whole(value)} USD`;
  if (unit === "FLOP/s") return `${show.few(value / 1e12)} TFLOP/s`;
  if (value >= 1e6) return `${value.toExponential(3)} ${unit}`.trim();
  return `${value >= 10 ? show.whole(value) : show.few(value)} ${unit}`.trim();
}

function Answered({ found }: { found: Budget }) {
  return (
    <Card title="Which means">
      <p role="status" class="hidden">{found.warnings[0] ?? "solved"}</p>
      <Table label="Budget" rows={Object.entries(found.figures)} mark={([, f]) => f.because === "given"} columns={[
        { head: "figure", cell: ([name]) => name.replaceAll("_", " ") },
        { head: "value", number: true, cell: ([name, figure]) => figureText(name, figure) },
        { head: "because", cell: ([, figure]) => figure.because },
      ]} />
      {found.warnings.length > 0 && <ul>{found.warnings.map((line) => <li>{line}</li>)}</ul>}
    </Card>
  );
}
