// Questions to the server, whose answers are the JSON that the command line prints.

export class Refused extends Error {
  constructor(
    public status: number,
    message: string,
    public hint: string,
  ) {
    super(message);
  }
}

export interface Answer<T> {
  data: T;
  text: string; // as it came: numbers as Python wrote them
  ms: number;
}

const KEPT = 400;
const known = new Map<string, Answer<unknown>>();

export function held<T>(path: string): Answer<T> | undefined {
  return known.get(path) as Answer<T> | undefined;
}

export async function ask<T>(path: string, keep = true): Promise<Answer<T>> {
  const old = keep ? held<T>(path) : undefined;
  if (old) return { ...old, ms: 0 };
  const start = performance.now();
  const found = await read<T>(await reach(`/api/${path}`), start);
  if (keep) {
    if (known.size >= KEPT) known.delete(known.keys().next().value!);
    known.set(path, found);
  }
  return found;
}

const TOKEN = "memfit-token";

// The address that `memfit ui` prints carries the token; the page keeps it and hides it from links.
export function takeToken(): void {
  const given = /^#token=([\w-]+)$/.exec(location.hash);
  if (!given) return;
  sessionStorage.setItem(TOKEN, given[1]!);
  history.replaceState(null, "", location.pathname);
}

export async function send<T>(path: string, method: "POST" | "DELETE", body?: unknown): Promise<Answer<T>> {
  const start = performance.now();
  const answer = await reach(`/api/${path}`, {
    method,
    headers: {
      "content-type": "application/json",
    },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  return read<T>(answer, start);
}

async function reach(url: string, init?: RequestInit): Promise<Response> {
  try {
    const token = sessionStorage.getItem(TOKEN) ?? "";  // runs and folders are shown to its holder
    return await fetch(url, { ...init, headers: { ...init?.headers, "x-memfit-token": token } });
  } catch {
    throw new Refused(0, "the server does not answer", "start `memfit ui` again");
  }
}

async function read<T>(answer: Response, start: number): Promise<Answer<T>> {
  const text = await answer.text();
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Refused(answer.status, `the server answered ${answer.status}: ${text.slice(0, 200)}`, "");
  }
  if (!answer.ok) throw new Refused(answer.status, data.error, data.hint);
  return { data, text, ms: performance.now() - start };
}

// Of questions that follow one another quickly, the last is asked when the one under way is answered.
export class Latest {
  private busy = false;
  private next: (() => Promise<void>) | null = null;

  run(work: () => Promise<void>): void {
    if (this.busy) this.next = work;
    else void this.go(work);
  }

  get idle(): boolean {
    return !this.busy;
  }

  private async go(work: () => Promise<void>): Promise<void> {
    this.busy = true;
    try {
      await work();
    } finally {
      this.busy = false;
      const next = this.next;
      this.next = null;
      if (next) this.run(next);
    }
  }
}
