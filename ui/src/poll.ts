// Looking again and again at what goes on elsewhere, which survives a look that fails.
import { useEffect, useState } from "preact/hooks";
import { Refused } from "./ask";

const LONGEST = 30000; // ms between two looks while the server does not answer

export interface Polled {
  error: unknown; // of the last look; null where it succeeded
  lost: boolean; // the server did not answer, and is asked again
}

// `look` says after how many ms it is to look again; null: no more. What it was refused stands in
// `error`; a server that does not answer is asked again, more and more seldom.
export function usePolling(look: (still: () => boolean) => Promise<number | null>, of: string): Polled {
  const [polled, setPolled] = useState<Polled>({ error: null, lost: false });
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let running = true;
    let failures = 0;
    const still = () => running;
    const go = async () => {
      let next: number | null;
      try {
        next = await look(still);
        failures = 0;
        if (running) setPolled({ error: null, lost: false });
      } catch (error) {
        failures += 1;
        next = Math.min(LONGEST, 1000 * 2 ** Math.min(failures - 1, 10));
        const lost = !(error instanceof Refused) || error.status === 0 || error.status >= 500;
        if (running) setPolled({ error, lost });
      }
      if (running && next != null) timer = setTimeout(() => void go(), next);
    };
    const hurry = () => {
      if (document.hidden || !failures) return;
      clearTimeout(timer);
      void go();
    };
    addEventListener("online", hurry);
    void go();
    return () => {
      running = false;
      clearTimeout(timer);
      removeEventListener("online", hurry);
    };
  }, [of]);
  return polled;
}
