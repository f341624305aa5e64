// What a request is set by: presets, sliders, fields. Every one writes a key of `--set`.
import { useEffect, useState } from "preact/hooks";
import { useNarrow } from "./charts";
import * as show from "./show";
import type { Keys } from "./state";
import { change } from "./state";
import type { DeviceRow, ModelRow, Words } from "./types";

interface Props {
  keys: Keys;
  set: (keys: Keys, touched?: Slider) => void;
  models: ModelRow[];
  devices: DeviceRow[];
  words: Words;
}

export interface Slider {
  key: string;
  label: string;
  stops: string[]; // "" leaves the key out: memfit decides
  say: (value: string) => string;
}

const powers = (from: number, to: number) => {
  const found = [];
  for (let n = from; n <= to; n *= 2) found.push(String(n));
  return found;
};
const grid = [512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
  65536, 98304, 131072];

export function sliders(keys: Keys, models: ModelRow[], devices: DeviceRow[]): Slider[] {
  const model = models.find((row) => row.id === keys.model);
  const longest = model?.max_sequence ?? 131072;
  const device = devices.find((row) => row.id === keys["hardware.device"]);
  return [
    { key: "task.sequence_length", label: "Sequence length",
      stops: ["", ...grid.filter((n) => n <= longest).map(String)],
      say: (value) => (value ? `${Number(value).toLocaleString("en")} tokens` : "memfit decides") },
    { key: "task.global_batch", label: "Sequences a step", stops: ["", ...powers(1, 1024)],
      say: (value) => (value === "1" ? "1 sequence" : `${value || 16} sequences`) },
    { key: "hardware.count", label: "Devices of a machine", stops: ["", ...powers(2, 8)],
      say: (value) => (value ? `${value} devices` : "1 device") },
    { key: "limits.memory", label: "Memory limit", stops: ["", ...limits(device)],
      say: (value) => value || "all the device has" },
  ];
}

function limits(device: DeviceRow | undefined): string[] {
  const most = device?.memory ? Math.floor(device.memory / 2 ** 30) : 64;
  const step = Math.max(1, Math.round(most / 20));
  return Array.from({ length: Math.floor(most / step) }, (_, i) => `${(i + 1) * step} GiB`);
}

const METHOD = ["method", "base_format", "weights"];
export const PRESETS: [string, string, Keys][] = [
  ["auto", "memfit decides", {}],
  ["full", "Full fine-tuning", { method: "full" }],
  ["lora", "LoRA", { method: "lora" }],
  ["qlora", "QLoRA (nf4)", { method: "lora", base_format: "nf4" }],
  ["scratch", "From scratch", { weights: "random", method: "full" }],
];

export function Controls(props: Props) {
  const { keys } = props;
  const put = (key: string, value: string) => props.set(change(keys, { [key]: value }));
  const narrow = useNarrow("(max-width:900px)"); // as app.css
  const [more, setMore] = useState(false);
  return (
    <form class="controls" onSubmit={(event) => event.preventDefault()} aria-label="What to plan">
      <Model {...props} />
      <Devices id="device" rows={props.devices} value={keys["hardware.device"] ?? ""} example="this machine's"
        set={(value) => put("hardware.device", value)} />
      <details class="more" open={!narrow || more} onToggle={(event) => narrow && setMore(event.currentTarget.open)}>
        <summary>Method, lengths and limits</summary>
        <div class="controls">
      <fieldset>
        <legend>Method</legend>
        {PRESETS.map(([id, label, wanted]) => (
          <label class="choice">
            <input type="radio" name="preset" value={id} checked={presetOf(keys) === id}
              onChange={() => props.set(change(without(keys, METHOD), wanted))} />
            {label}
          </label>
        ))}
      </fieldset>
      {sliders(keys, props.models, props.devices).map((slider) => (
        <Range slider={slider} value={keys[slider.key] ?? ""}
          set={(value) => props.set(change(keys, { [slider.key]: value }), slider)} />
      ))}
      <label>
        What is learned
        <select value={keys["task.objective"] ?? ""} id="objective"
          onChange={(event) => put("task.objective", event.currentTarget.value)}>
          {Object.entries(props.words.objectives).map(([name, about]) => (
            <option value={name === "pretrain" ? "" : name}>{name}: {about}</option>
          ))}
        </select>
      </label>
      <label>
        Whose step
        <select value={keys.framework ?? ""} id="framework"
          onChange={(event) => put("framework", event.currentTarget.value)}>
          {props.words.frameworks.map((name) => (
            <option value={name === "memfit" ? "" : name}>{name}</option>
          ))}
        </select>
      </label>
      <Text id="tokens" label="Tokens to train on" example="1e9" value={keys["task.tokens"] ?? ""}
        set={(value) => put("task.tokens", value)} />
      <Text id="time" label="Time limit" example="48 h" value={keys["limits.time"] ?? ""}
        set={(value) => put("limits.time", value)} />
      <Text id="cost" label="Money limit" example="500 USD" value={keys["limits.cost"] ?? ""}
        set={(value) => put("limits.cost", value)} />
      <Other {...props} />
        </div>
      </details>
    </form>
  );
}

export function without(keys: Keys, names: string[]): Keys {
  return Object.fromEntries(Object.entries(keys).filter(([key]) => !names.includes(key)));
}

function presetOf(keys: Keys): string {
  const own = METHOD.filter((key) => keys[key]);
  return (
    PRESETS.find(([, , wanted]) =>
      own.length === Object.keys(wanted).length && own.every((key) => wanted[key] === keys[key]),
    )?.[0] ?? ""
  );
}

function Model({ keys, set, models, words }: Props) {
  const pasted = (keys.model ?? "").startsWith("{");
  const [open, setOpen] = useState(pasted);
  const [text, setText] = useState(pasted ? keys.model : "");
  useEffect(() => setText(pasted ? keys.model : ""), [keys.model]);
  return (
    <div class="field">
      <Text id="model" label="Model" list="models" example="llama-3.1-8b"
        value={pasted ? "" : (keys.model ?? "")} set={(value) => set({ ...keys, model: value })} />
      <datalist id="models">
        {models.filter((row) => words.families.includes(row.model_type)).map((row) => (
          <option value={row.id}>{`${row.name}, ${show.count(row.parameters)}`}</option>
        ))}
      </datalist>
      <details open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>or paste a config.json</summary>
        <label>
          <span class="hidden">config.json</span>
          <textarea id="config" rows={6} spellcheck={false} value={text}
            placeholder={'{"model_type": "llama", …}'}
            onInput={(event) => setText(event.currentTarget.value)}
            onChange={(event) => set({ ...keys, model: event.currentTarget.value.trim() })} />
        </label>
      </details>
    </div>
  );
}

// A device is found by writing any part of its id, name or maker.
export function Devices(props: { id: string; rows: DeviceRow[]; value: string; example: string; set: (value: string) => void }) {
  const rows = [...props.rows].sort((a, b) => a.vendor.localeCompare(b.vendor) || a.name.localeCompare(b.name));
  return (
    <div class="field">
      <Text id={props.id} label="Device" list={`${props.id}s`} example={props.example} value={props.value} set={props.set} />
      <datalist id={`${props.id}s`}>
        {rows.map((row) => (
          <option value={row.id}>
            {`${row.vendor} ${row.name}, ${row.memory ? show.bytes(row.memory) : `${row.memory_datasheet} by its data sheet`}`}
          </option>
        ))}
      </datalist>
    </div>
  );
}

export function Range(props: { slider: Slider; value: string; set: (value: string) => void }) {
  const { slider, value } = props;
  const stops = slider.stops.includes(value) ? slider.stops : [...slider.stops, value];
  const at = stops.indexOf(value);
  const id = `slider-${slider.key}`;
  return (
    <div class="slider">
      <label for={id}>{slider.label}</label>
      <output for={id}>{slider.say(value)}</output>
      <input id={id} type="range" min={0} max={stops.length - 1} step={1} value={at}
        aria-valuetext={slider.say(value)}
        onInput={(event) => props.set(stops[Number(event.currentTarget.value)]!)} />
    </div>
  );
}

// A text that is taken when it is left or Enter is pressed, not at each key.
export function Text(props: {
  id: string;
  label: string;
  value: string;
  example?: string;
  list?: string;
  set: (value: string) => void;
}) {
  const [now, setNow] = useState(props.value);
  useEffect(() => setNow(props.value), [props.value]);
  return (
    <label>
      {props.label}
      <input id={props.id} value={now} list={props.list} placeholder={props.example}
        spellcheck={false} autocomplete="off"
        onFocus={(event) => props.list && event.currentTarget.select()} // a list shows what the text begins
        onInput={(event) => setNow(event.currentTarget.value)}
        onChange={(event) => props.set(event.currentTarget.value.trim())} />
    </label>
  );
}

const SHOWN = new Set(["model", "hardware.device", "task.sequence_length", "task.global_batch",
  "hardware.count", "limits.memory", "limits.time", "limits.cost", "task.tokens", "task.objective",
  "framework", ...METHOD]);

// Keys that no control has: each is told, can be taken away, and any can be added.
function Other({ keys, set }: Props) {
  const [text, setText] = useState("");
  const rest = Object.entries(keys).filter(([key]) => !SHOWN.has(key) && !key.startsWith("_"));
  const add = () => {
    const [key, ...value] = text.split("=");
    if (!key?.trim() || !value.length) return;
    setText("");
    set(change(keys, { [key.trim()]: value.join("=") }));
  };
  return (
    <div class="field">
      {rest.length > 0 && (
        <ul class="chips" aria-label="Set beside">
          {rest.map(([key, value]) => (
            <li>
              <code>{`${key}=${value}`}</code>
              <button type="button" aria-label={`leave ${key} out`}
                onClick={() => {
                  document.getElementById("other")?.focus(); // the button goes with its chip
                  set(without(keys, [key]));
                }}>×</button>
            </li>
          ))}
        </ul>
      )}
      <label>
        Any other key
        <span class="row">
          <input id="other" value={text} placeholder="micro_batch=2" spellcheck={false}
            autocomplete="off" onInput={(event) => setText(event.currentTarget.value)}
            onKeyDown={(event) => event.key === "Enter" && add()} />
          <button type="button" onClick={add}>Set</button>
        </span>
      </label>
    </div>
  );
}
