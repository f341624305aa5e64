// The plan as files of the tool that one trains with.
import { useEffect, useState } from "preact/hooks";
import { ask } from "./ask";
import { Card, Copy, Table, Trouble, download } from "./parts";
import { command, queryOf, type Keys } from "./state";
import type { Export, Words } from "./types";

export function ExportScreen({ keys, set, words }: { keys: Keys; set: (keys: Keys) => void; words: Words }) {
  const to = keys._to ?? "trl";
  const [made, setMade] = useState<Export | null>(null);
  const [error, setError] = useState<unknown>(null);
  const query = queryOf(keys, { to });
  useEffect(() => {
    let still = true;
    setMade(null);
    setError(null);
    ask<Export>(`export?${query}`).then((a) => still && setMade(a.data), (e) => still && setError(e));
    return () => { still = false; };
  }, [query]);
  return (
    <div class="answer" aria-busy={!made && !error}>
      <Card title="For which tool">
        <label>
          Tool
          <select id="target" value={to} onChange={(event) => set({ ...keys, _to: event.currentTarget.value })}>
            {words.targets.map((name) => <option>{name}</option>)}
          </select>
        </label>
        <pre>{`${command(keys, "export")} --to ${to} --out ${to}`}</pre>
      </Card>
      {error ? <Trouble error={error} /> : !made && <p role="status" class="soft">planning…</p>}
      {made && <Files made={made} />}
    </div>
  );
}

function Files({ made }: { made: Export }) {
  const left = Object.entries(made.left_out);
  const many = Object.keys(made.files).length;
  return (
    <>
      <p role="status">
        {made.target} {made.version}: {many === 1 ? "one file" : `${many} files`}; start with <code>{made.start}</code>
      </p>
      {Object.entries(made.files).map(([name, text]) => (
        <Card title={name}>
          <p class="actions">
            <Copy text={text} label={`Copy ${name}`} />{" "}
            <button type="button" class="main" onClick={() => download(name, text, "text/plain")}>Download {name}</button>
          </p>
          <pre class="file" tabIndex={0} aria-label={name}>{text}</pre>
        </Card>
      ))}
      {left.length > 0 && (
        <Card title="What the tool has no key for">
          <Table label="Left out" rows={left} columns={[
            { head: "key", cell: ([key]) => <code>{key}</code> },
            { head: "why", cell: ([, why]) => why },
          ]} />
        </Card>
      )}
    </>
  );
}
