// Pieces that several screens share.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { Refused } from "./ask";
import type { Polled } from "./poll";
import * as show from "./show";
import { readState, writeState } from "./state";
import type { Entry, Memory, Words } from "./types";
import { needs } from "./types";

export function Card(props: { title: string; children: ComponentChildren; id?: string }) {
  return (
    <section id={props.id}>
      <h2>{props.title}</h2>
      {props.children}
    </section>
  );
}

const QUOTED = /`([^`]+)`/g;

// The names that a hint offers, each with the request in which it stands for the wrong one.
function meant(refused: Refused): [string, string][] {
  const at = /did you mean (.*)/.exec(refused.hint)?.[1];
  if (!at) return [];
  const { screen, keys } = readState(location.hash);
  const wrong = [...refused.message.matchAll(QUOTED)].map((match) => match[1]!);
  const old = Object.entries(keys).find(([key, value]) => wrong.includes(value) || wrong.includes(key));
  if (!old) return [];
  const [key, value] = old;
  return [...at.matchAll(QUOTED)].map(([, right]) => {
    const { [key]: _, ...rest } = keys;
    const next = wrong.includes(value) ? { ...rest, [key]: right! } : { ...rest, [right!]: value };
    return [right!, writeState({ screen, keys: next })];
  });
}

export function Trouble({ error }: { error: unknown }) {
  const refused = error instanceof Refused ? error : new Refused(0, String(error), "");
  const links = meant(refused);
  return (
    <div class="trouble" role="alert">
      <p>
        <b>error:</b> {refused.message}
      </p>
      {refused.hint && (
        <p>
          <b>hint:</b> {refused.hint.split(QUOTED).map((piece, index) => {
            const found = index % 2 ? links.find(([name]) => name === piece) : undefined;
            return found ? <a href={found[1]}>{`\`${piece}\``}</a> : index % 2 ? `\`${piece}\`` : piece;
          })}
        </p>
      )}
    </div>
  );
}

// What is shown is as old as the last answer; the server is asked again.
export function Reconnecting({ polled }: { polled: Polled }) {
  if (!polled.error) return null;
  if (!polled.lost) return <Trouble error={polled.error} />;
  return <p role="status" class="reconnecting">Reconnecting: the server does not answer. What stands here is its last answer.</p>;
}

export interface Column<Row> {
  head: string;
  cell: (row: Row) => ComponentChildren;
  number?: boolean;
  short?: boolean; // never broken into lines
}

export function Table<Row>(props: {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
  mark?: (row: Row) => boolean;
}) {
  const align = (column: Column<Row>) => (column.number ? "n" : column.short ? "short" : undefined);
  return (
    <div class="scroll" role="region" aria-label={props.label} tabIndex={0}>
      <table style={{ "--columns": props.columns.length }}>
        <thead>
          <tr>
            {props.columns.map((c) => (
              <th scope="col" class={align(c)}>
                {c.head || <span class="hidden">chosen</span>}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row) => (
            <tr class={props.mark?.(row) ? "chosen" : undefined}>
              {props.columns.map((c) => (
                <td class={align(c)}>{c.cell(row)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// A dotted name or a path, which may go on in the next line behind a dot or a stroke.
export function Name({ text }: { text: string }) {
  return <code>{text.split(/(?<=[./])/).flatMap((piece, index) => (index ? [<wbr />, piece] : [piece]))}</code>;
}

export function Key({ kind, words }: { kind: string; words: Words }) {
  return (
    <svg class="key" viewBox="0 0 12 12" aria-hidden="true">
      <rect width="12" height="12" rx="3" fill={words.colours[kind]} />
    </svg>
  );
}

export function Verdict({ memory, words }: { memory: Memory; words: Words }) {
  return <span class={`verdict ${memory.verdict}`}>{words.verdicts[memory.verdict]}</span>;
}

// What the memory is against the limit, in a sentence as the terminal's.
export function room(memory: Memory): string {
  const needed = needs(memory);
  if (needed == null) return "memory unknown";
  if (memory.usable == null) return `needs ${show.bytes(needed)}; how much may be used is unknown`;
  const usable = show.bytes(memory.usable);
  const [low, high] = [memory.total_low ?? null, memory.total_high ?? null];
  const range = low != null && high != null && high > low ? ` (${show.bytes(low)} to ${show.bytes(high)})` : "";
  const over = needed - memory.usable;
  if (memory.verdict === "at_risk") return `needs ${show.bytes(needed)}${range} of ${usable} usable: it may not fit`;
  const left = `${show.bytes(Math.abs(over))} ${over > 0 ? "too much" : "to spare"}`;
  return `needs ${show.bytes(needed)}${range} of ${usable} usable: ${left}`;
}

export interface Part {
  kind: string;
  nbytes: number;
  entries: Entry[];
}

const BEYOND: Record<string, string> = {
  fragmentation: "reserved by the allocator beyond what is allocated",
  context: "the device's context: kernels and libraries, outside the allocator",
};

// Entries by kind, in the order of the words' colours.
export function sumUp(entries: Entry[], order: string[]): Part[] {
  const found = new Map<string, Part>();
  for (const entry of entries) {
    const part = found.get(entry.kind) ?? { kind: entry.kind, nbytes: 0, entries: [] };
    part.nbytes += entry.nbytes;
    part.entries.push(entry);
    found.set(entry.kind, part);
  }
  return [...found.values()]
    .filter((part) => part.nbytes > 0)
    .sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
}

// Kinds of all that is held against the limit, the allocator's and the context's share included.
export function partsOf(memory: Memory, order: string[]): Part[] {
  const entries = [...memory.entries];
  const sum = entries.reduce((total, entry) => total + entry.nbytes, 0);
  const context = entries.reduce((total, entry) => total + (entry.kind === "context" ? entry.nbytes : 0), 0);
  const beyond = (kind: string, nbytes: number) => {
    const phase = memory.peak_phase;
    if (nbytes > 0) entries.push({ kind, phase, owner: "device", nbytes, because: BEYOND[kind]! });
  };
  if (memory.peak_reserved != null) {
    beyond("fragmentation", memory.peak_reserved - (sum - context));
    if (memory.device_total != null) {
      beyond("context", memory.device_total - memory.peak_reserved - context);
    }
  }
  return sumUp(entries, order);
}

const WIDTH = 1000;
const LABELLED = 0.11; // of the width

// The bar of one device against the usable line. `onPick` opens a kind's reasons.
export function Bar(props: {
  name: string;
  parts: Part[];
  limit: number | null;
  range?: [number, number] | null; // within which the total is
  full?: number;
  words: Words;
  onPick?: (kind: string) => void;
}) {
  const total = props.parts.reduce((sum, part) => sum + part.nbytes, 0);
  const full = props.full ?? Math.max(total, props.limit ?? 0, props.range?.[1] ?? 0, 1);
  let left = 0;
  const label = props.parts.map((p) => `${p.kind} ${show.bytes(p.nbytes)}`).join(", ");
  const at = props.limit == null ? null : (props.limit / full) * 100;
  return (
    <div class="bar">
      <span class="barname">{props.name}</span>
      <div class="track" role="img" aria-label={`${props.name}: ${label}`}>
        <svg viewBox={`0 0 ${WIDTH} 40`} preserveAspectRatio="none">
          {props.parts.map((part) => {
            const width = (part.nbytes / full) * WIDTH;
            const x = left;
            left += width;
            return (
              <rect x={x} width={width} height="40" class="seg" fill={props.words.colours[part.kind]}
                data-kind={part.kind} data-bytes={part.nbytes}
                onClick={() => props.onPick?.(part.kind)}>
                <title>{`${part.kind}: ${show.bytes(part.nbytes)} (${show.whole(part.nbytes)} B)`}</title>
              </rect>
            );
          })}
        </svg>
        <Labels parts={props.parts} full={full} words={props.words} />
        {props.range && <Range from={(props.range[0] / full) * 100} to={(props.range[1] / full) * 100} />}
        {at != null && <Limit at={at} />}
      </div>
      <span class="n">{show.bytes(total)}</span>
    </div>
  );
}

// The band in which the total is, as a bracket below the bar.
function Range({ from, to }: { from: number; to: number }) {
  return (
    <svg class="limit" viewBox="0 0 100 50" preserveAspectRatio="none" aria-hidden="true">
      <path class="range" d={`M${from} 44V49H${to}V44`} />
    </svg>
  );
}

// The band of a memory's total; null where none is known.
export function rangeOf(memory: Memory): [number, number] | null {
  const { total_low: low, total_high: high } = memory;
  return low != null && high != null && high > low ? [low, high] : null;
}

function Limit({ at }: { at: number }) {
  return (
    <svg class="limit" viewBox="0 0 100 50" preserveAspectRatio="none" aria-hidden="true">
      <line x1={Math.min(at, 99.8)} x2={Math.min(at, 99.8)} y1="0" y2="50" class="halo" />
      <line x1={Math.min(at, 99.8)} x2={Math.min(at, 99.8)} y1="0" y2="50" />
    </svg>
  );
}

function Labels({ parts, full, words }: { parts: Part[]; full: number; words: Words }) {
  let left = 0;
  return (
    <div class="labels" aria-hidden="true">
      {parts.map((part) => {
        const share = part.nbytes / full;
        const style = { left: `${left * 100}%`, width: `${share * 100}%`, color: words.inks[part.kind] };
        left += share;
        if (share < LABELLED) return null;
        return (
          <span style={style}>{part.kind.replace("_", " ")}</span>
        );
      })}
    </div>
  );
}

// Every kind with its bytes; opened, each of its entries with its because.
export function Reasons(props: {
  parts: Part[];
  words: Words;
  open: string | null;
  onToggle: (kind: string | null) => void;
}) {
  const total = props.parts.reduce((sum, part) => sum + part.nbytes, 0);
  return (
    <div class="reasons">
      {props.parts.map((part) => (
        <details key={part.kind} id={`kind-${part.kind}`} open={props.open === part.kind}
          onToggle={(event) => {
            const open = (event.currentTarget as HTMLDetailsElement).open;
            if (open) props.onToggle(part.kind);
            else if (props.open === part.kind) props.onToggle(null);
          }}>
          <summary>
            <Key kind={part.kind} words={props.words} />
            <span class="grow">{part.kind.replace("_", " ")}</span>
            <span class="n" data-bytes={part.nbytes}>{show.bytes(part.nbytes)}</span>
            <span class="n soft share">{show.share(part.nbytes / total)}</span>
          </summary>
          <ul>
            {[...part.entries].sort((a, b) => b.nbytes - a.nbytes).map((entry) => (
              <li>
                <b>{entry.owner}</b> {show.bytes(entry.nbytes)}{" "}
                <span class="soft">because {entry.because}</span>
              </li>
            ))}
          </ul>
        </details>
      ))}
    </div>
  );
}

export function Copy({ text, label }: { text: string; label: string }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return (
    <button type="button" onClick={() => void copy()}>
      {done ? "Copied" : label}
    </button>
  );
}

export function download(name: string, text: string, kind = "application/json"): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export function Figure({ value, what, id }: { value: string; what: string; id?: string }) {
  return (
    <div class="figure" id={id}>
      <b>{value}</b>
      <span>{what}</span>
    </div>
  );
}
