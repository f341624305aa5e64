// Certificates: jobs of the server, which go on when the screen is left or the page is loaded anew.
import { useState } from "preact/hooks";
import { ask, send } from "./ask";
import { Card, Table, Trouble } from "./parts";
import { usePolling, type Polled } from "./poll";
import * as show from "./show";
import { requestOf, writeState, type Keys } from "./state";
import type { JobRow, Words } from "./types";

const OPEN = new Set(["waiting", "running"]);
const SOON = 700; // ms between two looks while one is open
const LATER = 5000;

export const isOpen = (job: JobRow) => OPEN.has(job.state);

export interface Jobs extends Polled {
  rows: JobRow[] | null; // the newest first; null before the first answer
  certify: (keys: Keys, rank: string) => Promise<void>;
  remove: (job: JobRow) => Promise<void>;
}

export function useJobs(): Jobs {
  const [rows, setRows] = useState<JobRow[] | null>(null);
  const [turn, setTurn] = useState(0);
  const polled = usePolling(async (still) => {
    const { data } = await ask<JobRow[]>("jobs", false);
    if (still()) setRows(data);
    return data.some(isOpen) ? SOON : LATER;
  }, String(turn));
  const again = () => setTurn((n) => n + 1);
  return {
    rows, ...polled,
    certify: async (keys, rank) => {
      await send("jobs", "POST", { query: requestOf(keys), rank: rank === "" ? null : Number(rank) });
      again();
    },
    remove: async (job) => {
      await send(`jobs/${job.id}`, "DELETE");
      again();
    },
  };
}

// The newest certificate of a request and a rank.
export function jobOf(rows: JobRow[] | null, keys: Keys, rank: string): JobRow | undefined {
  const wanted = JSON.stringify(requestOf(keys));
  return rows?.find((job) => JSON.stringify(requestOf(job.query)) === wanted && String(job.rank ?? "") === rank);
}

export function Progress({ job }: { job: JobRow }) {
  const after = job.expected ? ` of about ${show.seconds(Math.round(job.expected))}, as the last one` : "";
  const words = job.state === "waiting" ? "waits for the certificate before it" :
    `${job.phase}: ${show.seconds(Math.round(job.elapsed))}${after}`;
  const done = job.expected ? Math.min(0.98, job.elapsed / job.expected) : undefined;
  return (
    <span class="progress">
      <progress value={done} aria-label="How far the certificate is" /> <span id="progress">{words}</span>
    </span>
  );
}

const STATES: Record<JobRow["state"], string> = {
  waiting: "waits", running: "runs", done: "done", failed: "failed", cancelled: "cancelled",
};

export function JobsCard({ jobs, keys, words }: { jobs: Jobs; keys: Keys; words: Words }) {
  const [error, setError] = useState<unknown>(null);
  if (!jobs.rows?.length) return null;
  const remove = (job: JobRow) => {
    document.getElementById("certify")?.focus(); // the button may go with its row
    setError(null);
    jobs.remove(job).catch(setError);
  };
  return (
    <Card title="Certificates of this session" id="jobs">
      {error ? <Trouble error={error} /> : null}
      <Table label="Certificates" rows={jobs.rows} mark={(job) => job === jobOf(jobs.rows, keys, keys._rank ?? "")} columns={[
        { head: "of", cell: (job) => <a href={addressOf(job)}>{nameOf(job)}</a> },
        { head: "state", cell: (job) => STATES[job.state] + (job.failure ? `: ${job.failure.error}` : "") },
        { head: "verdict", short: true, cell: (job) =>
          job.verdict && <span class={job.verdict}>{words.verdicts[job.verdict]}</span> },
        { head: "took", number: true, cell: (job) => (job.elapsed ? show.seconds(Math.round(job.elapsed)) : "-") },
        { head: "action", cell: (job) => (
          <button type="button" aria-label={`${isOpen(job) ? "cancel" : "forget"} ${nameOf(job)}`} onClick={() => remove(job)}>
            {isOpen(job) ? "Cancel" : "Forget"}
          </button>
        ) },
      ]} />
    </Card>
  );
}

function addressOf(job: JobRow): string {
  return writeState({ screen: "timeline", keys: { ...job.query, _rank: String(job.rank ?? "") } });
}

function nameOf(job: JobRow): string {
  const { model = "", ...rest } = job.query;
  const own = Object.entries(rest).map(([key, value]) => (key === "hardware.device" ? value : `${key}=${value}`));
  const rank = job.rank == null ? [] : [`rank ${job.rank}`];
  return [model.startsWith("{") ? "a pasted config.json" : model, ...own, ...rank].join(", ");
}
