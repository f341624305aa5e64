// What is asked stands in the address: `#/screen?model=…&task.sequence_length=4096`. Keys are those
// of `--set`; a key that begins with `_` is the screen's own.

export const SCREENS = ["plan", "explore", "timeline", "run", "export", "budget"] as const;
export type Screen = (typeof SCREENS)[number];
export type Keys = Record<string, string>;

export interface State {
  screen: Screen;
  keys: Keys;
}

const FIRST: Keys = { model: "llama-3.1-8b", "hardware.device": "h100-sxm" };

export function readState(hash: string): State {
  const [path, query] = hash.replace(/^#\/?/, "").split("?", 2);
  const screen = SCREENS.find((name) => name === path) ?? "plan";
  const keys = Object.fromEntries(new URLSearchParams(query ?? ""));
  return { screen, keys: Object.keys(keys).length ? keys : { ...FIRST } };
}

export function writeState(state: State): string {
  const query = new URLSearchParams(clean(state.keys)).toString();
  return `#/${state.screen}${query ? `?${query}` : ""}`;
}

function clean(keys: Keys): Keys {
  return Object.fromEntries(Object.entries(keys).filter(([, value]) => value !== ""));
}

// The keys of the request alone, in one order, so that equal requests have one address.
export function requestOf(keys: Keys): Keys {
  const own = Object.entries(clean(keys)).filter(([key]) => !key.startsWith("_"));
  return Object.fromEntries(own.sort(([a], [b]) => (a < b ? -1 : 1)));
}

export function queryOf(keys: Keys, more: Keys = {}): string {
  return new URLSearchParams({ ...requestOf(keys), ...clean(more) }).toString();
}

// A value as `--set` reads it, of one that JSON holds.
export function asYaml(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(asYaml).join(", ")}]`;
  if (value === null || typeof value !== "object") return String(value);
  return `{${Object.entries(value).map(([key, item]) => `${key}: ${asYaml(item)}`).join(", ")}}`;
}

// A change of the request: a key that is set drops what it replaces, `recompute` drops
// `recompute.blocks`.
export function change(keys: Keys, changes: Record<string, unknown>): Keys {
  const made = { ...keys };
  for (const [key, value] of Object.entries(changes)) {
    for (const old of Object.keys(made)) {
      if (old.startsWith(`${key}.`) || key.startsWith(`${old}.`)) delete made[old];
    }
    made[key] = asYaml(value);
  }
  return clean(made);
}

export function command(keys: Keys, verb = "plan"): string {
  const { model = "", ...rest } = requestOf(keys);
  const target = model.startsWith("{") ? "config.json" : model;
  const words = ["memfit", verb, quote(target)];
  for (const [key, value] of Object.entries(rest)) {
    if (key === "hardware.device") words.push("--device", quote(value));
    else if (key === "limits.memory") words.push("--memory", quote(value));
    else words.push("--set", quote(`${key}=${value}`));
  }
  return words.join(" ");
}

function quote(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}
