// What the verbs return, as far as the page reads it.

export interface Entry { kind: string; phase: string; owner: string; nbytes: number; because: string }
export interface Memory {
  peak_allocated: number | null;
  peak_reserved: number | null;
  device_total: number | null;
  total_low?: number | null; // the band around `device_total`
  total_high?: number | null;
  usable: number | null;
  verdict: string;
  because: string;
  peak_phase: string;
  entries: Entry[];
}
export interface Time {
  step_seconds: number | null;
  tokens_per_second: number | null;
  mfu: number | null;
  hfu: number | null;
  model_flops_per_step: number;
  total_seconds: number | null;
  because: string;
  phases?: Phase[]; // of an iteration that samples answers
}
export interface Phase {
  phase: string;
  seconds: number | null;
  seconds_low: number | null;
  seconds_high: number | null;
  tokens_per_second: number | null;
  because: string;
}
export interface Cost {
  device_hours: number | null;
  usd: number | null;
  kwh: number | null;
  kg_co2: number | null;
  because: string;
}
export interface Considered {
  label: string;
  changes: Record<string, unknown>;
  peak_allocated: number;
  device_total: number | null;
  exact: boolean;
  relative_time: number;
  fits: boolean;
  chosen: boolean;
  because: string;
}
export interface Span { op: string; stream: string; start: number; duration: number; because: string }
export interface Parallel { [axis: string]: number | boolean }
export interface Recipe {
  model: { name: string };
  device: string;
  steps: number;
  method: string;
  precision: string;
  micro_batch: number;
  accumulation: number;
  sequence_length: number;
  parallel: Parallel;
  [key: string]: unknown;
}
export interface Plan {
  recipe_digest: string;
  request: { task: { data: string } };
  recipe: Recipe;
  memory: Memory;
  time: Time;
  cost: Cost;
  ledger: { entries: Entry[] };
  timeline: { spans: Span[] };
  considered: Considered[];
  levers: Considered[];
  assumptions: string[];
  ways_out: WayOut[];
}
export interface WayOut {
  title: string;
  changes: Record<string, unknown>;
  label: string;
  peak_allocated: number;
  device_total: number | null;
  total_seconds: number | null;
  usd: number | null;
  exact: boolean;
  because: string;
}
export interface Words {
  version: string;
  verdicts: Record<string, string>;
  phases: Record<string, string>;
  colours: Record<string, string>;
  inks: Record<string, string>;
  families: string[];
  targets: string[];
  frameworks: string[];
  objectives: Record<string, string>;
}
export interface ModelRow { id: string; name: string; model_type: string; parameters: number; max_sequence: number }
export interface DeviceRow { id: string; name: string; vendor: string; memory: number | null; memory_datasheet: string }
export interface Tensor { nbytes: number; count: number; kind: string; module: string; op: string; source: string }
export interface Certificate {
  recipe_digest: string;
  device: string;
  memory: Memory;
  phases: Record<string, number>;
  at_peak: Tensor[];
  bounds: string[];
  seconds: number;
}
export type Point = [number, number, number, number, number, number | null, number[], number[]];
export type Stream = [number, string[]]; // its number, and the kinds allocated on it
export type Slot = [string, number, number, number, number]; // pass, micro-batch, chunk, start, end
export interface Strip {
  kind: string;
  micro_batches: number;
  chunks: number;
  pieces: number;
  seconds: number | null;
  ranks: Slot[][];
  because: string;
}
export interface Curve {
  events: number;
  kinds: string[];
  peak: number;
  points: Point[];
  stretches: [string, number, number][];
  streams: Stream[];
  strings: string[];
}
export interface StepMemory {
  certificate: Certificate;
  plan: Plan | null;
  because: string;
  ranks: number;
  rank: number | null;
  curve: Curve;
}
export interface JobRow {
  id: string;
  query: Record<string, string>;
  rank: number | null;
  state: "waiting" | "running" | "done" | "failed" | "cancelled";
  phase: string;
  elapsed: number;
  expected: number | null;
  verdict: string;
  failure: { error: string; hint: string } | null;
}
export interface RunRow {
  name: string;
  title: string;
  recipe_digest: string;
  verdict: string;
  steps: number;
  steps_done: number;
  finished: boolean;
  ended_early: string;
  predicted: number | null;
  certified: number | null;
  measured: number | null;
  usable: number | null;
  predicted_rate: number | null;
  measured_rate: number | null;
  loss: number | null;
  because: string;
}
export interface Comparison {
  name: string;
  unit: string;
  predicted: number | null;
  certified: number | null;
  measured: number | null;
  error_predicted: number | null;
  error_certified: number | null;
}
export interface Report {
  title: string;
  recipe_digest: string;
  comparisons: Comparison[];
  plan: Plan;
  certificate: Certificate | null;
  run: {
    steps_done: number;
    finished: boolean;
    warnings: string[];
    ended_early: string;
    answers: Answered[];
  } | null;
}
// one sampled answer of a run, with what it was worth
export interface Answered { step: number; prompt: string; completion: string; reward: number | null }
export interface LogRow {
  step: number;
  loss: number;
  evaluation_loss?: number | null;
  reward?: number | null;
  evaluation_reward?: number | null;
  kl?: number | null;
  length?: number | null;
  reward_accuracy?: number | null;
  tokens_per_second?: number;
  memory_peak_allocated?: number | null;
}
export interface RunView { name: string; report: Report; log: LogRow[] }
export interface Export {
  target: string;
  version: string;
  files: Record<string, string>;
  left_out: Record<string, string>;
  start: string;
  peak: { [key: string]: unknown };
}
export interface Figure { value: number | null; unit: string; because: string }
export interface Budget { figures: Record<string, Figure>; warnings: string[] }
export interface Offered {
  offer: { device: string; count: number };
  framework: string;
  verdict: string;
  recipe: string;
  needs: number | null;
  usable: number | null;
  step_seconds: number | null;
  total_seconds: number | null;
  device_hours: number | null;
  usd: number | null;
  usd_per_million_tokens: number | null;
  best: boolean;
  because: string;
}
export interface Offers { rows: Offered[]; objective: string }
export interface WhyNot { answer: string; because: string[]; requested: Plan | null; chosen: Plan }

export const needs = (memory: Memory): number | null =>
  memory.device_total ?? memory.peak_reserved ?? memory.peak_allocated;
