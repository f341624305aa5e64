// Charts drawn by hand: lines and dots in SVG, their labels in HTML, so that text never shrinks.
import { useEffect, useState } from "preact/hooks";
import * as show from "./show";

export interface Dot {
  label?: string; // written beside it
  x: number;
  y: number;
  name: string;
  shape: "chosen" | "fits" | "not";
  front: boolean;
}

const W = 1000;
const H = 400;

export function useNarrow(query: string): boolean {
  const [is, set] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const look = () => set(media.matches);
    media.addEventListener("change", look);
    return () => media.removeEventListener("change", look);
  }, []);
  return is;
}

export function Scatter(props: {
  dots: Dot[];
  limit: number | null;
  x: string;
  y: string;
  showX: (n: number) => string;
  showY: (n: number) => string;
}) {
  const { dots } = props;
  const [at, setAt] = useState<Dot | null>(null);
  const high = useNarrow("(max-width:560px)") ? W : H;
  if (!dots.length) return <p class="soft">nothing to draw</p>;
  const must = dots.filter((dot) => dot.shape === "chosen" || dot.front);
  const least = Math.min(...dots.map((dot) => dot.x));
  const most = endOf(dots.map((dot) => dot.x), must.map((dot) => dot.x));
  const margin = (most - least) * 0.08 || most * 0.08;
  const left = least > most * 0.3 ? Math.max(0, least - margin) : 0; // no empty half beside them
  const right = most + margin;
  const far = endOf(dots.map((dot) => dot.y), must.map((dot) => dot.y));
  const limit = props.limit != null && props.limit < far * 4 ? props.limit : null;
  const highest = limit == null ? far : Math.min(far, Math.max(limit * BEYOND, ...must.map((dot) => dot.y)));
  const top = Math.max(highest, limit ?? 0) * 1.08;
  const x = (dot: Dot) => Math.min(W - EDGE, ((dot.x - left) / (right - left)) * W);
  const y = (n: number) => Math.max(EDGE, high - (n / top) * high);
  const slow = dots.filter((dot) => dot.x > right);
  const large = dots.filter((dot) => dot.y > top);
  const chosen = dots.find((dot) => dot.shape === "chosen");
  const drawn = [...dots].sort((a, b) => Number(a === chosen) - Number(b === chosen)); // the last is on top
  const front = dots.filter((dot) => dot.front).sort((a, b) => a.x - b.x);
  return (
    <figure class="chart">
      <Axis top={top} ticks={props.y === "cost" ? show.centTicks(top) : show.byteTicks(top)} say={props.showY} />
      <div class="plotarea">
        <svg class="free" viewBox={`0 0 ${W} ${high}`} role="img"
          aria-label={`${dots.length} plans by ${props.x} and ${props.y}; the table below has them all`}>
          {limit != null && <line class="limitline" x1="0" x2={W} y1={y(limit)} y2={y(limit)} />}
          <polyline class="front" points={front.map((dot) => `${x(dot)},${y(dot.y)}`).join(" ")} />
          {drawn.map((dot) => (
            <Mark dot={dot} x={x(dot)} y={y(dot.y)} beyond={dot.x > right ? "x" : dot.y > top ? "y" : ""} pick={() => setAt(dot)} />
          ))}
        </svg>
        {chosen?.label && (
          <span class="dotlabel" aria-hidden="true" style={{ left: `${x(chosen) / W * 100}%`, top: `${y(chosen.y) / high * 100}%`,
            transform: `translate(${-x(chosen) / W * 100}%, ${y(chosen.y) > high / 6 ? "-165%" : "65%"})` }}>{chosen.label}</span>
        )}
      </div>
      <div class="xs">
        <span>{left ? props.showX(left) : "0"}</span><span>{props.x}</span><span>{props.showX(right)}</span>
      </div>
      <figcaption class="soft small" aria-live="polite">
        {at ? `${at.name}: ${props.showX(at.x)}, ${props.showY(at.y)}` :
          `■ chosen, ● fits, ✕ does not fit${limit == null ? "" : "; dashed: what may be used"}`}
        {slow.length > 0 && <><br /><span class="beyond">▶ {slow.length} beyond the right edge, up to {props.showX(Math.max(...slow.map((dot) => dot.x)))}</span></>}
        {large.length > 0 && <><br /><span class="beyond">▲ {large.length} above, up to {props.showY(Math.max(...large.map((dot) => dot.y)))}</span></>}
      </figcaption>
    </figure>
  );
}

const EDGE = 12; // of the drawing, at which what is beyond it stands
const BEYOND = 2; // times the limit; what needs more does not fit by far
const OUTLIER = 1.5; // times the third quartile; what is beyond does not stretch an axis

// The end of an axis: of the farthest value, or where a few are far beyond the others, of those
// that are not, and of all that must be seen.
function endOf(values: number[], must: number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const most = sorted.at(-1)!;
  const end = Math.max(sorted[Math.floor((sorted.length - 1) * 0.75)]! * OUTLIER, ...must);
  return most > end * 1.2 ? sorted.findLast((value) => value <= end)! : most;
}

function Mark({ dot, x, y, beyond, pick }: { dot: Dot; x: number; y: number; beyond: string; pick: () => void }) {
  const events = { onPointerEnter: pick, onClick: pick };
  const title = <title>{dot.name}</title>;
  if (dot.shape === "chosen") {
    return <rect class="dot chosen" x={x - 9} y={y - 9} width="18" height="18" {...events}>{title}</rect>;
  }
  if (beyond) {
    const d = beyond === "x" ? `M${x - 8} ${y - 8}L${x + 8} ${y}L${x - 8} ${y + 8}Z` : `M${x - 8} ${y + 8}L${x} ${y - 8}L${x + 8} ${y + 8}Z`;
    return <path class={`dot edge ${dot.shape}`} d={d} {...events}>{title}</path>;
  }
  if (dot.shape === "fits") return <circle class="dot fits" cx={x} cy={y} r="9" {...events}>{title}</circle>;
  const d = `M${x - 8} ${y - 8}L${x + 8} ${y + 8}M${x - 8} ${y + 8}L${x + 8} ${y - 8}`;
  return <path class="dot not" d={d} {...events}>{title}</path>;
}

export function Axis({ top, ticks, say }: { top: number; ticks: number[]; say: (n: number) => string }) {
  return (
    <div class="ys" aria-hidden="true">
      {ticks.map((n) => <span style={{ bottom: `${(n / top) * 100}%` }}>{say(n)}</span>)}
    </div>
  );
}

export interface Line {
  name: string;
  points: [number, number][];
  style: number; // dash and colour
}

const STYLES = 6;

// Lines over steps; the legend names each with its dash.
export function Lines(props: {
  title: string;
  lines: Line[];
  marks?: { name: string; value: number }[];
  say: (n: number) => string;
  zero?: boolean;
  ticks?: (top: number) => number[];
}) {
  const lines = props.lines.filter((line) => line.points.length > 0);
  const marks = props.marks ?? [];
  const values = [...lines.flatMap((line) => line.points.map(([, v]) => v)), ...marks.map((m) => m.value)];
  if (!lines.length || values.length < 2) return <p class="soft">{props.title}: nothing yet</p>;
  const steps = lines.flatMap((line) => line.points.map(([s]) => s));
  const first = Math.min(...steps);
  const last = Math.max(...steps, first + 1);
  const highest = Math.max(...values);
  const low = props.zero ? 0 : Math.min(...values) - 0.05 * (highest - Math.min(...values) || highest || 1);
  const top = highest + 0.05 * (highest - low || 1);
  const x = (step: number) => ((step - first) / (last - first)) * W;
  const y = (value: number) => H - ((value - low) / (top - low)) * H;
  const ticks = props.zero ? (props.ticks ?? show.ticks)(top) : show.roundTicks(low, top);
  return (
    <figure class="chart">
      <h3>{props.title}</h3>
      <div class="ys" aria-hidden="true">
        {ticks.map((n) => <span style={{ bottom: `${((n - low) / (top - low)) * 100}%` }}>{props.say(n)}</span>)}
      </div>
      <div class="plotarea">
        <svg viewBox={`0 0 ${W} ${H}`} preserveAspectRatio="none" role="img"
          aria-label={`${props.title}: ${lines.map((line) => `${line.name}, last ${props.say(line.points.at(-1)![1])}`).join("; ")}`}>
          {marks.map((mark, index) => (
            <line class={`mark m${index}`} x1="0" x2={W} y1={y(mark.value)} y2={y(mark.value)}>
              <title>{mark.name}</title>
            </line>
          ))}
          {lines.map((line) => (
            <polyline class={`line l${line.style % STYLES}`}
              points={line.points.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" ")} />
          ))}
        </svg>
      </div>
      <div class="xs"><span>step {first}</span><span>step {last}</span></div>
      <figcaption class="small">
        {lines.map((line) => (
          <span class="legend"><svg viewBox="0 0 24 6" aria-hidden="true"><line class={`line l${line.style % STYLES}`} x1="0" x2="24" y1="3" y2="3" /></svg>{line.name}</span>
        ))}
        {marks.map((mark, index) => (
          <span class="legend"><svg viewBox="0 0 24 6" aria-hidden="true"><line class={`mark m${index}`} x1="0" x2="24" y1="3" y2="3" /></svg>{mark.name} {props.say(mark.value)}</span>
        ))}
      </figcaption>
    </figure>
  );
}
