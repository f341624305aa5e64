import { render } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Latest, Refused, ask, held, takeToken } from "./ask";
import { BudgetScreen } from "./budget";
import { Controls, sliders, type Slider } from "./controls";
import { ExploreScreen } from "./explore";
import { ExportScreen } from "./export";
import { Trouble } from "./parts";
import { PlanScreen, type Planned } from "./plan";
import { RunScreen } from "./run";
import { SCREENS, queryOf, readState, writeState, type Keys, type Screen, type State } from "./state";
import { TimelineScreen } from "./timeline";
import type { DeviceRow, ModelRow, Plan, Words } from "./types";

const TITLES: Record<Screen, string> = {
  plan: "Plan", explore: "Explore", timeline: "Timeline", run: "Runs", export: "Export", budget: "Budget",
};
const REST = 250; // ms without a change, after which the whole plan is asked for
const AHEAD = 5000; // ms of asking ahead, the most
const PAUSE = 1500; // ms between two stops of a slider, from which on they are two changes
const planner = new Latest();
const NOTHING = { answer: null, error: null, full: false, busy: true, query: "" };

interface Catalogue {
  words: Words;
  models: ModelRow[];
  devices: DeviceRow[];
}

function usePlan(keys: Keys, all: Slider[], touched: string, on: boolean): Planned {
  const [last, setLast] = useState<Planned & { query: string }>(NOTHING);
  const query = queryOf(keys);
  // From the render on in which the question changes, the last answer is an earlier question's.
  const planned = last.query === query ? last : { ...last, full: false, busy: true };
  const latest = useRef(query);
  latest.current = query;
  useEffect(() => {
    if (!on) return;
    const take = async (verb: "draft" | "plan") => {
      const path = `${verb}?${query}`;
      let next: Planned;
      try {
        next = { answer: await ask<Plan>(path), error: null, full: verb === "plan", busy: false };
      } catch (error) {
        next = { answer: null, error, full: true, busy: false };
      }
      if (latest.current === query) setLast({ ...next, query });
    };
    setLast((old) => ({ ...old, full: false, busy: true }));
    if (held(`plan?${query}`)) void take("plan");
    else {
      planner.run(() => take("draft"));
      const timer = setTimeout(() => planner.run(() => take("plan")), REST);
      return () => clearTimeout(timer);
    }
  }, [query, on]);
  useEffect(() => {
    if (planned.full && !planned.error) void foresee(keys, all, touched, () => latest.current === query);
  }, [planned.full, query, touched]);
  return planned;
}

// At rest every slider's stops are asked for before one moves: those of the slider that was moved
// last first, and the nearest first, for as long as AHEAD.
async function foresee(keys: Keys, all: Slider[], touched: string, still: () => boolean): Promise<void> {
  const until = performance.now() + AHEAD;
  const own = all.filter((slider) => slider.key === touched);
  for (const sliders of [own, all.filter((slider) => !own.includes(slider))]) {
    for (const path of ways(keys, sliders)) {
      if (!still() || !planner.idle || performance.now() > until) return;
      if (!held(path)) await ask(path).catch(() => undefined);
    }
  }
}

// The drafts one stop away from these keys, then those two away, and so on.
function ways(keys: Keys, sliders: Slider[]): string[] {
  const found: [number, string][] = [];
  for (const { key, stops } of sliders) {
    const at = stops.indexOf(keys[key] ?? "");
    stops.forEach((stop, index) => {
      const path = `draft?${queryOf({ ...keys, [key]: stop })}`;
      if (at >= 0 && index !== at) found.push([Math.abs(index - at), path]);
    });
  }
  return found.sort(([a], [b]) => a - b).map(([, path]) => path);
}

// Where what had the focus is gone, as a row's link that was followed, the answer has it, and not
// the page's beginning.
function useFocusKept(): void {
  const last = useRef<Element | null>(null);
  useEffect(() => {
    const keep = (event: FocusEvent) => { last.current = event.target as Element; };
    addEventListener("focusin", keep);
    return () => removeEventListener("focusin", keep);
  }, []);
  useEffect(() => {
    if (last.current && !last.current.isConnected) document.getElementById("main")?.focus();
  });
}

function App({ catalogue }: { catalogue: Catalogue }) {
  const [state, setState] = useState<State>(() => readState(location.hash));
  const [touched, setTouched] = useState("");
  const moved = useRef({ key: "", at: 0 });
  useEffect(() => {
    const follow = () => setState(readState(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useFocusKept();
  const { screen, keys } = state;
  // What a control changed is put into the newest keys: it may have been drawn before another's change.
  const set = useCallback((wanted: Keys, slider?: Slider) => {
    const next = readState(location.hash);
    for (const key of new Set([...Object.keys(keys), ...Object.keys(wanted)])) {
      if (wanted[key] === keys[key]) continue;
      next.keys[key] = wanted[key] ?? "";
    }
    const address = writeState(next);
    if (address !== location.hash) {
      const since = performance.now() - moved.current.at;
      // the stops of one slider's way are one change, which Back undoes as a whole
      const goesOn = slider != null && slider.key === moved.current.key && since < PAUSE;
      if (goesOn) history.replaceState(null, "", address);
      else history.pushState(null, "", address);
    }
    moved.current = { key: slider?.key ?? "", at: performance.now() };
    setTouched(slider?.key ?? "");
    setState(readState(location.hash));
  }, [keys]);
  useEffect(() => {
    document.title = `memfit: ${TITLES[screen]}`;
  }, [screen]);
  const planned = usePlan(
    keys, sliders(keys, catalogue.models, catalogue.devices), touched, screen === "plan" || screen === "explore");
  const shared = { keys, set, ...catalogue };
  const asks = screen === "plan" || screen === "explore" || screen === "timeline" || screen === "export";
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => {
        event.preventDefault();
        document.getElementById("main")?.focus();
      }}>To the answer</a>
      <header>
        <strong>memfit</strong>
        <nav aria-label="Screens">
          {SCREENS.map((name) => (
            <a href={writeState({ screen: name, keys })} aria-current={name === screen ? "page" : undefined}>
              {TITLES[name]}
            </a>
          ))}
        </nav>
      </header>
      <div class={asks ? "beside" : "alone"}>
        {asks && (
          <aside aria-label="The request">
            <Controls {...shared} />
          </aside>
        )}
        <main id="main" tabIndex={-1}>
          <h1 class={screen === "plan" ? "hidden" : undefined}>{TITLES[screen]}</h1>
          {screen === "plan" && <PlanScreen {...shared} planned={planned} />}
          {screen === "explore" && <ExploreScreen {...shared} planned={planned} />}
          {screen === "timeline" && <TimelineScreen {...shared} />}
          {screen === "run" && <RunScreen {...shared} />}
          {screen === "export" && <ExportScreen {...shared} />}
          {screen === "budget" && <BudgetScreen {...shared} />}
        </main>
      </div>
      <footer class="soft small">memfit {catalogue.words.version}; everything is worked out on this machine.</footer>
    </>
  );
}

async function start(): Promise<void> {
  const root = document.getElementById("app")!;
  takeToken();
  try {
    const [words, models, devices] = await Promise.all([
      ask<Words>("words"), ask<ModelRow[]>("models"), ask<DeviceRow[]>("devices"),
    ]);
    root.replaceChildren();
    render(<App catalogue={{ words: words.data, models: models.data, devices: devices.data }} />, root);
  } catch (error) {
    root.replaceChildren();
    render(<main><Trouble error={error instanceof Refused ? error : String(error)} /></main>, root);
  }
}

void start();
