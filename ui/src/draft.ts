// The plan of a query, asked for when it changes: never that of an earlier one.
import { useEffect, useState } from "preact/hooks";
import { ask } from "./ask";
import type { Plan } from "./types";

interface Draft {
  plan: Plan | null; // null while it is not there, and for an empty query
  error: unknown;
}

export function useDraft(query: string): Draft {
  const [found, setFound] = useState<(Draft & { of: string }) | null>(null);
  useEffect(() => {
    if (!query) return;
    let still = true;
    ask<Plan>(`draft?${query}`).then(
      (a) => still && setFound({ of: query, plan: a.data, error: null }),
      (error) => still && setFound({ of: query, plan: null, error }),
    );
    return () => { still = false; };
  }, [query]);
  return found?.of === query ? found : { plan: null, error: undefined };
}
