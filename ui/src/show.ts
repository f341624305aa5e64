// Figures in the words of `memfit.core.units`; `unknown` where nobody knows.

export const UNKNOWN = "unknown";
type Maybe = number | null | undefined;

function round(n: number, digits: number): string {
  const text = n.toPrecision(digits);
  return text.includes("e") ? Number(text).toExponential() : String(Number(text));
}

export function bytes(n: Maybe): string {
  if (n == null) return UNKNOWN;
  for (const [unit, power] of [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]] as const) {
    if (Math.abs(n) >= 2 ** power) return `${(n / 2 ** power).toFixed(2)} ${unit}`;
  }
  return `${n.toFixed(0)} B`;
}

export function seconds(s: Maybe): string {
  if (s == null) return UNKNOWN;
  if (s < 1) return s >= 1e-3 ? `${round(s * 1e3, 3)} ms` : `${round(s * 1e6, 3)} us`;
  if (s < 60) return `${round(s, 3)} s`;
  if (s < 3600) return `${Math.trunc(s / 60)} min ${Math.trunc(s % 60)} s`;
  if (s < 86400) return `${Math.trunc(s / 3600)} h ${Math.trunc((s % 3600) / 60)} min`;
  return `${Math.trunc(s / 86400)} d ${Math.trunc((s % 86400) / 3600)} h`;
}

export function count(n: Maybe): string {
  if (n == null) return UNKNOWN;
  for (const [unit, factor] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]] as const) {
    if (Math.abs(n) >= factor) {
      const many = n / factor;
      return `${Math.abs(many) < 100 ? round(many, 3) : many.toFixed(0)}${unit}`;
    }
  }
  return n.toFixed(0);
}

export function whole(n: Maybe): string {
  return n == null ? UNKNOWN : Math.round(n).toLocaleString("en");
}

export function share(n: Maybe): string {
  return n == null ? UNKNOWN : `${(n * 100).toFixed(1)}%`;
}

export function usd(n: Maybe): string {
  if (n == null) return UNKNOWN;
  return `${n.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} USD`;
}

export function few(n: Maybe): string {
  return n == null ? UNKNOWN : n >= 1000 ? whole(n) : round(n, 3);
}

export function signed(error: Maybe): string {
  if (error == null) return "-";
  if (error === 0) return "0";
  if (error >= 9) return `${round(1 + error, 3)}x`;
  if (Math.abs(error) < 1e-4) return "<0.01%";
  return `${error > 0 ? "+" : ""}${(error * 100).toFixed(2)}%`;
}

// of a recipe's `parallel`, what is no axis of the mesh
const NO_AXES = new Set(["zero", "ep_imbalance"]);

export function mesh(parallel: Record<string, unknown>): string {
  const axes = Object.entries(parallel).filter(([axis, n]) => !NO_AXES.has(axis) && typeof n === "number" && n > 1);
  return axes.map(([axis, n]) => `${axis} ${n}`).join(", ");
}

export function quantity(value: Maybe, unit: string): string {
  if (value == null) return "-";
  if (unit === "bytes" || unit === "B") return bytes(value);
  if (unit === "s") return seconds(value);
  if (unit === "fraction of peak") return share(value);
  return value < 1000 ? round(value, 4) : whole(value);
}

export function ticks(top: number, scale = 1): number[] {
  if (!(top > 0)) return [0];
  const whole = top / scale;
  const power = 10 ** Math.floor(Math.log10(whole / 4));
  const step = Math.max(...[1, 2, 5].map((f) => f * power).filter((s) => s <= whole / 4));
  return Array.from({ length: Math.floor(whole / step + 1e-9) + 1 }, (_, n) => n * step * scale);
}

// Round numbers between two that need not begin at 0.
export function roundTicks(low: number, top: number): number[] {
  const power = 10 ** Math.floor(Math.log10((top - low) / 3));
  const step = Math.max(...[1, 2, 5].map((f) => f * power).filter((s) => s <= (top - low) / 3));
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(top / step + 1e-9) - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

// Cents are the least that is said.
export function centTicks(top: number): number[] {
  return ticks(top).filter((n) => Math.abs(n * 100 - Math.round(n * 100)) < 1e-6);
}

export function byteTicks(top: number): number[] {
  const unit = [2 ** 30, 2 ** 20, 2 ** 10].find((u) => top >= 2 * u) ?? 1;
  return ticks(top, unit);
}
