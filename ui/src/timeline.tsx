// Memory over one step, event by event, from the certificate; beside it what is predicted of the
// same plan: each phase's peak, the seconds of its streams, its pipeline.
import { useEffect, useState } from "preact/hooks";
import { Refused, ask } from "./ask";
import { Text } from "./controls";
import { Area } from "./curve";
import { useDraft } from "./draft";
import { JobsCard, Progress, isOpen, jobOf, useJobs } from "./jobs";
import { Bar, Card, Key, Name, Reconnecting, Table, Trouble, Verdict, partsOf, room, sumUp, type Part } from "./parts";
import * as show from "./show";
import { SecondsCard } from "./seconds";
import { command, queryOf, type Keys } from "./state";
import type { JobRow, Plan, StepMemory, Words } from "./types";

const ROWS = 60;

export function TimelineScreen({ keys, set, words }: { keys: Keys; set: (keys: Keys) => void; words: Words }) {
  const jobs = useJobs();
  const [error, setError] = useState<unknown>(null);
  const rank = keys._rank ?? "";
  const job = jobOf(jobs.rows, keys, rank);
  const open = job != null && isOpen(job);
  const made = useResult(job);
  useEffect(() => setError(null), [queryOf(keys), rank]);
  const certify = () => {
    if (open) return; // a button that is disabled would lose the focus
    setError(null);
    jobs.certify(keys, rank).catch(setError);
  };
  const cancel = () => {
    document.getElementById("certify")?.focus();
    jobs.remove(job!).catch(setError);
  };
  const own = !keys.framework || keys.framework === "memfit";
  const failed = error ?? made.error ?? (job?.failure && new Refused(409, job.failure.error, job.failure.hint));
  return (
    <div class="answer" aria-busy={open}>
      {own ? (
        <Card title="The trainer's own step, on fake tensors">
          <div class="row filters">
            <Text id="rank" label="Rank" value={rank} example="the fullest"
              set={(value) => set({ ...keys, _rank: value.replace(/\D/g, "") })} />
            <button type="button" class="main" id="certify" aria-disabled={open} onClick={certify}>
              {open ? "Certifying…" : "Certify and draw"}
            </button>
            {open && <button type="button" id="cancel" onClick={cancel}>Cancel</button>}
          </div>
          {open && <Progress job={job} />}
          <Reconnecting polled={jobs} />
          <pre>{`${command(keys)} --folder runs/first\nmemfit certify runs/first/plan.json --timeline`}</pre>
        </Card>
      ) : (
        <Card title={`The step of ${keys.framework}`}>
          <p id="no-certificate">
            A certificate runs memfit's own step, so there is none of {keys.framework}'s: its memory event by
            event is not known here. Below stands what is predicted of it.
          </p>
          <pre>{command(keys)}</pre>
        </Card>
      )}
      {failed ? <Trouble error={failed} /> : null}
      {own && <p role="status" class="headline">
        {open ? <span class="soft">certifying in the background; other screens can be used meanwhile</span> : made.data ? (
          <>
            <Verdict memory={made.data.certificate.memory} words={words} />
            <span>{made.data.certificate.device} {room(made.data.certificate.memory)}</span>
          </>
        ) : job?.state === "cancelled" && <span class="soft">cancelled</span>}
      </p>}
      {made.data && <Drawn key={job!.id} made={made.data} words={words} />}
      {own && <JobsCard jobs={jobs} keys={keys} words={words} />}
      <Predicted keys={keys} words={words} bare={!made.data} />
    </div>
  );
}

// The result of a finished job.
function useResult(job: JobRow | undefined): { data: StepMemory | null; error: unknown } {
  const [found, setFound] = useState<{ of: string; data: StepMemory | null; error: unknown } | null>(null);
  const of = job?.state === "done" ? job.id : "";
  useEffect(() => {
    if (!of) return;
    let still = true;
    ask<StepMemory>(`jobs/${of}/result`).then(
      (a) => still && setFound({ of, data: a.data, error: null }),
      (error) => still && setFound({ of, data: null, error }),
    );
    return () => { still = false; };
  }, [of]);
  return of && found?.of === of ? found : { data: null, error: null };
}

// What the plan knows without a certificate; `bare`: nothing else on the screen shows its memory.
function Predicted({ keys, words, bare }: { keys: Keys; words: Words; bare: boolean }) {
  const query = queryOf(keys);
  const { plan, error } = useDraft(query);
  if (error) return <Trouble error={error} />;
  if (!plan) return <p role="status" class="soft">planning…</p>;
  return (
    <>
      {bare && <PhasesCard plan={plan} words={words} />}
      <SecondsCard plan={plan} query={query} />
    </>
  );
}

// The predicted peak of each phase by kind, on one scale.
function PhasesCard({ plan, words }: { plan: Plan; words: Words }) {
  const order = Object.keys(words.colours);
  const phases = Object.keys(words.phases)
    .map((phase) => ({ phase, entries: plan.ledger.entries.filter((entry) => entry.phase === phase) }))
    .filter(({ entries }) => entries.length)
    .map(({ phase, entries }) => ({ phase, parts: sumUp(entries, order) }));
  if (!phases.length) return null;
  const total = (parts: Part[]) => parts.reduce((sum, part) => sum + part.nbytes, 0);
  const full = Math.max(...phases.map(({ parts }) => total(parts)), 1);
  const kinds = order.filter((kind) => phases.some(({ parts }) => parts.some((part) => part.kind === kind)));
  return (
    <Card title={`Memory at the peak of each phase (predicted${plan.recipe.device ? `, ${worldOf(plan)}` : ""})`}>
      <div class="bars phasebars">
        {phases.map(({ phase, parts }) => (
          <Bar name={`${words.phases[phase]}${phase === plan.memory.peak_phase ? " (peak)" : ""}`}
            parts={parts} limit={null} full={full} words={words} />
        ))}
      </div>
      <p class="small">
        {kinds.map((kind) => <span class="legend"><Key kind={kind} words={words} />{kind.replace("_", " ")}</span>)}
      </p>
    </Card>
  );
}

function worldOf(plan: Plan): string {
  const axes = show.mesh(plan.recipe.parallel);
  return axes ? `the fullest device of ${axes}` : "one device";
}

function Drawn({ made, words }: { made: StepMemory; words: Words }) {
  const { certificate, curve } = made;
  const parts = partsOf(certificate.memory, Object.keys(words.colours));
  return (
    <>
      {made.because && <p class="soft">No plan: {made.because}.</p>}
      <Card title={`Memory over the step's allocations and releases${made.rank == null ? "" : `, rank ${made.rank} of ${made.ranks}`}`}>
        <Area curve={curve} certificate={certificate} words={words} />
      </Card>
      <Card title="At the peak">
        <div class="bars">
          <Bar name="certified" parts={parts} limit={certificate.memory.usable} words={words} />
        </div>
        <Table label="Alive at the peak" rows={certificate.at_peak.slice(0, ROWS)} columns={[
          { head: "kind", short: true, cell: (t) => <><Key kind={t.kind} words={words} /> {t.kind.replace("_", " ")}</> },
          { head: "module", cell: (t) => <Name text={t.module || "(outside any module)"} /> },
          { head: "made by", cell: (t) => <><Name text={t.op} /><br /><span class="soft"><Name text={t.source} /></span></> },
          { head: "each", number: true, cell: (t) => `${show.whole(t.count)} x ${show.bytes(t.nbytes)}` },
          { head: "together", number: true, cell: (t) => show.bytes(t.count * t.nbytes) },
        ]} />
        {certificate.at_peak.length > ROWS && (
          <p class="soft small">{certificate.at_peak.length - ROWS} more rows in certificate.json</p>
        )}
      </Card>
      <Card title="Holds for"><ul>{certificate.bounds.map((line) => <li>{line}</li>)}</ul></Card>
    </>
  );
}
