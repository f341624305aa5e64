// Memory over one step, event by event: what is alive by kind, the peak and its figure, and a view
// that can be narrowed down to single events.
import { useRef, useState } from "preact/hooks";
import { Axis } from "./charts";
import { Key } from "./parts";
import * as show from "./show";
import type { Certificate, Curve, Point, Stream, Words } from "./types";

const H = 360;
const LANE = 40;
const ROOM = 1.12; // above the highest line, for the peak's figure
const NEAREST = 16; // events of the narrowest view
const BESIDE_PEAK = 60; // events on each side of the peak in the view that the button gives
const DRAGGED = 8; // px of a drag that narrows the view; less is a click
const ZOOM = 4;

type View = [number, number]; // first and last event

export function Area({ curve, certificate, words }: { curve: Curve; certificate: Certificate; words: Words }) {
  const whole: View = [0, Math.max(curve.events, 1)];
  const [at, setAt] = useState(curve.peak);
  const [view, setView] = useState<View>(whole);
  const [drag, setDrag] = useState<View | null>(null);
  const svg = useRef<SVGSVGElement>(null);
  const { memory } = certificate;
  const highest = Math.max(...curve.points.map((p) => Math.max(sum(p[6]), p[5] ?? 0)), 1);
  const context = (memory.device_total ?? 0) - (memory.peak_reserved ?? 0);
  const limit = memory.usable == null ? null : memory.usable - (memory.peak_reserved == null ? 0 : context);
  const drawn = limit != null && limit > 0 && limit <= highest * 1.6 ? limit : null;
  const top = Math.max(highest * ROOM, drawn ?? 0) * 1.02;
  const y = (n: number) => H * (1 - n / top);
  const point = curve.points[at]!;
  const peak = curve.points[curve.peak]!;
  const [from, to] = view;

  const look = (middle: number, width: number) => setView(within(middle, width, whole));
  const go = (index: number) => {
    const next = Math.min(curve.points.length - 1, Math.max(0, index));
    const event = curve.points[next]![0];
    setAt(next);
    if (event < from || event > to) look(event, to - from); // the view follows the mark
  };
  const zoom = (factor: number) => look(point[0], (to - from) / factor);
  const toPeak = () => {
    setAt(curve.peak);
    look(peak[0], 2 * BESIDE_PEAK);
  };
  const eventAt = (event: PointerEvent) => {
    const box = svg.current!.getBoundingClientRect();
    return from + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (to - from);
  };
  const key = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
    const act = { Home: () => go(curve.peak), "+": () => zoom(ZOOM), "=": () => zoom(ZOOM), "-": () => zoom(1 / ZOOM),
      "0": () => setView(whole), p: toPeak }[event.key];
    if (by) go(at + by);
    act?.();
    if (by || act) event.preventDefault();
  };
  const release = () => {
    const width = svg.current!.getBoundingClientRect().width;
    if (drag && (Math.abs(drag[1] - drag[0]) / (to - from)) * width >= DRAGGED) {
      look((drag[0] + drag[1]) / 2, Math.abs(drag[1] - drag[0]));
    }
    setDrag(null);
  };
  const reserved = curve.points.filter((p) => p[5] != null);
  const seen = peak[0] >= from && peak[0] <= to;
  return (
    <figure class="chart tall">
      <Axis top={top} ticks={show.byteTicks(top)} say={show.bytes} />
      <div class="plotarea">
        <svg id="curve" ref={svg} viewBox={`${from} 0 ${to - from} ${H}`} preserveAspectRatio="none" tabindex={0}
          role="slider" aria-label="Memory over the step; the arrow keys step through it, + and - change the view, P shows the peak"
          aria-valuemin={0} aria-valuemax={curve.points.length - 1} aria-valuenow={at} aria-valuetext={say(point, curve)}
          onPointerDown={(event) => {
            if (event.button !== 0) return;
            event.currentTarget.setPointerCapture(event.pointerId);
            setDrag([eventAt(event), eventAt(event)]);
          }}
          onPointerMove={(event) => {
            const here = eventAt(event);
            setAt(nearest(curve, here));
            if (drag) setDrag([drag[0], here]);
          }}
          onPointerUp={release} onPointerCancel={() => setDrag(null)} onKeyDown={key}>
          {curve.stretches.map(([phase, start, stop], index) => (
            <rect class={index % 2 ? "band odd" : "band"} x={start} width={stop - start} height={H}>
              <title>{words.phases[phase] ?? phase}</title>
            </rect>
          ))}
          {areas(curve, y).reverse().map(([kind, points]) => (
            <polygon class="area" fill={words.colours[kind]} stroke={words.colours[kind]} points={points}>
              <title>{kind}</title>
            </polygon>
          ))}
          {reserved.length > 0 && (
            <polyline class="reserved" points={reserved.map((p) => `${p[0]},${y(p[5]!).toFixed(1)}`).join(" ")} />
          )}
          {drawn != null && <line class="limitline" x1="0" x2={curve.events} y1={y(drawn)} y2={y(drawn)} />}
          {at !== curve.peak && <line class="hair" x1={point[0]} x2={point[0]} y1="0" y2={H} />}
          {drag && <rect class="dragged" x={Math.min(...drag)} width={Math.abs(drag[1] - drag[0])} height={H} />}
        </svg>
        <Phases curve={curve} words={words} view={view} />
        {seen && <PeakMark share={(peak[0] - from) / (to - from)} height={sum(peak[6]) / top} nbytes={sum(peak[6])} />}
      </div>
      <div class="xs"><span>event {show.whole(from)}</span><span>event {show.whole(to)}</span></div>
      <p class="zoom">
        <button type="button" id="to-peak" onClick={toPeak}>Show the peak</button>
        <button type="button" aria-label="zoom in" onClick={() => zoom(ZOOM)}>+</button>
        <button type="button" aria-label="zoom out" onClick={() => zoom(1 / ZOOM)}>−</button>
        <button type="button" id="whole" onClick={() => setView(whole)}>Whole step</button>
        <span class="soft small">or drag over a part of it</span>
      </p>
      <figcaption class="small">
        {curve.kinds.map((kind) => (
          <span class="legend"><Key kind={kind} words={words} />{kind.replace("_", " ")}</span>
        ))}
        {reserved.length > 0 && <span class="legend">solid line: reserved by the allocator</span>}
        {drawn != null && <span class="legend">dashed: the limit, less the context</span>}
        {curve.points.length < curve.events && (
          <p class="soft">
            Drawn: {show.whole(curve.points.length)} of {show.whole(curve.events)} events: the highest and the lowest of
            every stretch, and every event around the peak.
          </p>
        )}
        <p id="reading" aria-live="polite">{say(point, curve)}{at === curve.peak && <b> (the peak)</b>}</p>
      </figcaption>
      <Lanes curve={curve} at={at} view={view} />
    </figure>
  );
}

// Its place is where the peak is, so that nothing covers it: the figure stands above.
function PeakMark({ share, height, nbytes }: { share: number; height: number; nbytes: number }) {
  const place = { left: `${share * 100}%`, transform: `translateX(${-share * 100}%)`, bottom: `${height * 100}%` };
  return (
    <div class="peakmark" aria-hidden="true">
      <i style={{ left: `${share * 100}%`, bottom: `${height * 100}%` }} />
      <span id="peak-figure" style={place}>peak {show.bytes(nbytes)}</span>
    </div>
  );
}

const sum = (values: number[]) => values.reduce((a, b) => a + b, 0);

function within(middle: number, width: number, [first, last]: View): View {
  const span = Math.min(last - first, Math.max(NEAREST, width));
  const from = Math.min(last - span, Math.max(first, middle - span / 2));
  return [from, from + span];
}

function nearest(curve: Curve, event: number): number {
  let best = 0;
  curve.points.forEach((p, i) => {
    if (Math.abs(p[0] - event) < Math.abs(curve.points[best]![0] - event)) best = i;
  });
  return best;
}

// What is alive of each stream's allocations, below the same events: the allocator never gives one
// stream's memory to another.
function Lanes({ curve, at, view: [from, to] }: { curve: Curve; at: number; view: View }) {
  const { streams, points } = curve;
  if (streams.length < 2) {
    return (
      <p class="soft small lanes" id="streams">
        {streams.length ? "All of it is allocated on one stream, on which the device computes." :
          "A CPU has no streams: its operators run one after the other."}
      </p>
    );
  }
  return (
    <div class="lanes" id="streams">
      <h3>By stream: what each one's allocations hold; memory of one is never given to another</h3>
      {streams.map((stream, index) => {
        const most = Math.max(...points.map((p) => p[7][index]!), 1);
        const y = (n: number) => LANE * (1 - n / most);
        const line = points.map((p) => `${p[0]},${y(p[7][index]!).toFixed(1)}`);
        const look = stream[0] ? "comm" : "comp";
        return (
          <div class="lane">
            <p class="small">
              <b>{nameOf(stream)}</b>, at most {show.bytes(most)}; here {show.bytes(points[at]![7][index])}
            </p>
            <svg viewBox={`${from} 0 ${to - from} ${LANE}`} preserveAspectRatio="none" role="img"
              aria-label={`${nameOf(stream)}: at most ${show.bytes(most)}`}>
              <polygon class={`area ${look}`} points={`0,${LANE} ${line.join(" ")} ${curve.events},${LANE}`} />
              <line class="hair" x1={points[at]![0]} x2={points[at]![0]} y1="0" y2={LANE} />
            </svg>
          </div>
        );
      })}
    </div>
  );
}

function nameOf([number, kinds]: Stream): string {
  const held = kinds.slice(0, 2).map((kind) => kind.replace("_", " ")).join(", ");
  return number ? `stream ${number} (${held})` : "computing (the default stream)";
}

function say(point: Point, curve: Curve): string {
  const [event, total, phase, what, where, reserved, kinds] = point;
  const held = curve.kinds.map((kind, i) => (kinds[i] ? `${kind.replace("_", " ")} ${show.bytes(kinds[i])}` : ""));
  const parts = [
    `event ${show.whole(event)}, ${curve.strings[phase]}: ${curve.strings[what]}`,
    `tensors ${show.bytes(total)}${reserved == null ? "" : `, reserved ${show.bytes(reserved)}`}`,
    held.filter(Boolean).join(", "),
    curve.strings[where] ?? "",
  ];
  return parts.filter(Boolean).join("; ");
}

function Phases({ curve, words, view: [from, to] }: { curve: Curve; words: Words; view: View }) {
  return (
    <div class="phases" aria-hidden="true">
      {curve.stretches.map(([phase, first, last]) => {
        const start = Math.max(0, ((first - from) / (to - from)) * 100);
        const width = Math.min(100, ((last - from) / (to - from)) * 100) - start;
        return width < 6 ? null : (
          <span style={{ left: `${start}%`, width: `${width}%` }}><i>{words.phases[phase] ?? phase}</i></span>
        );
      })}
    </div>
  );
}

// One polygon a kind, each on what lies below it. Drawn from the topmost down, each with an edge of
// one pixel: a spike that is narrower than a pixel is then as wide as its edge and as high as it is.
function areas(curve: Curve, y: (n: number) => number): [string, string][] {
  let below = curve.points.map(() => 0);
  return curve.kinds.map((kind, index) => {
    const above = curve.points.map((p, i) => below[i]! + p[6][index]!);
    const spot = (values: number[]) => curve.points.map((p, i) => `${p[0]},${y(values[i]!).toFixed(1)}`);
    const points = [...spot(above), ...spot(below).reverse()].join(" ");
    below = above;
    return [kind, points];
  });
}
