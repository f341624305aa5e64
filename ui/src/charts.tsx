// Charts drawn by hand: lines and dots in SVG, their labels in HTML, so that text never shrinks.
import { useEffect, useState } from "preact/hooks";
import * as show from "./show";

export interface Dot {
  x: number;
  y: number;
  name: string;
  shape: "chosen" | "fits" | "not";
  front: boolean;
}

const W = 1000;
const H = 400;
const NARROW = matchMedia("(max-width:560px)"); // as app.css

function useNarrow(): boolean {
  const [is, set] = useState(NARROW.matches);
  useEffect(() => {
    const look = () => set(NARROW.matches);
    NARROW.addEventListener("change", look);
    return () => NARROW.removeEventListener("change", look);
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
  const high = useNarrow() ? W : H;
  if (!dots.length) return <p class="soft">nothing to draw</p>;
  const [least, most] = [Math.min(...dots.map((dot) => dot.x)), Math.max(...dots.map((dot) => dot.x))];
  const margin = (most - least) * 0.08 || most * 0.08;
  const left = least > most * 0.3 ? Math.max(0, least - margin) : 0; // no empty half beside them
  const right = most + margin;
  const highest = Math.max(...dots.map((dot) => dot.y));
  const limit = props.limit != null && props.limit < highest * 4 ? props.limit : null;
  const top = Math.max(highest, limit ?? 0) * 1.08;
  const x = (dot: Dot) => ((dot.x - left) / (right - left)) * W;
  const y = (n: number) => high - (n / top) * high;
  const front = dots.filter((dot) => dot.front).sort((a, b) => a.x - b.x);
  return (
    <figure class="chart">
      <Axis top={top} ticks={props.y === "cost" ? show.centTicks(top) : show.byteTicks(top)} say={props.showY} />
      <div class="plotarea">
        <svg class="free" viewBox={`0 0 ${W} ${high}`} role="img"
          aria-label={`${dots.length} plans by ${props.x} and ${props.y}; the table below has them all`}>
          {limit != null && <line class="limitline" x1="0" x2={W} y1={y(limit)} y2={y(limit)} />}
          <polyline class="front" points={front.map((dot) => `${x(dot)},${y(dot.y)}`).join(" ")} />
          {dots.map((dot) => <Mark dot={dot} x={x(dot)} y={y(dot.y)} pick={() => setAt(dot)} />)}
        </svg>
      </div>
      <div class="xs">
        <span>{left ? props.showX(left) : "0"}</span><span>{props.x}</span><span>{props.showX(right)}</span>
      </div>
      <figcaption class="soft small" aria-live="polite">
        {at ? `${at.name}: ${props.showX(at.x)}, ${props.showY(at.y)}` :
          `■ chosen, ● fits, ✕ does not fit${limit == null ? "" : "; dashed: what may be used"}`}
      </figcaption>
    </figure>
  );
}

function Mark({ dot, x, y, pick }: { dot: Dot; x: number; y: number; pick: () => void }) {
  const events = { onPointerEnter: pick, onClick: pick };
  const title = <title>{dot.name}</title>;
  if (dot.shape === "chosen") {
    return <rect class="dot chosen" x={x - 9} y={y - 9} width="18" height="18" {...events}>{title}</rect>;
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
  const ticks = props.zero ? (props.ticks ?? show.ticks)(top) : [0.05, 0.5, 0.95].map((part) => low + part * (top - low));
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
