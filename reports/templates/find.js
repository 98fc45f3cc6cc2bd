// The search of reports/cells.py for a page: the cells that fit every word, or the nearest one.
const { misfits, most, cells } = CELLS;
const numeric = (text) => (text.trim() !== "" && +text >= 0 && +text < Infinity ? +text : null);
const has = (cell, name, term) => (cell.terms[name] ?? "").split(" ").includes(term);
const wordsOf = (query) =>
  query.toLowerCase().replace(/(\d)\s*[x×]\s*(?=\d)/g, "$1x").replaceAll(",", " ")
    .replace(/(\d+) tokens?\b/g, "m=$1")
    .replace(/(?<![=\w])(\d{3,})x(\d{3,})\b/g, "n=$1 k=$2")
    .replace(/([\d.]+) ?%/g, (_, share) => `sparsity=${+(share / 100).toFixed(6)}`)
    .split(/\s+/).filter(Boolean);
const actualOf = (word, cell) => (word.name === "format" ? cell.row : cell.fields[word.name] ?? "");
const misfit = (word, cell) => {
  const actual = actualOf(word, cell);
  const named = word.text.includes("="), names = named ? [word.name] : Object.keys(cell.terms);
  if (names.some((name) => has(cell, name, word.value)) || word.value === actual.toLowerCase()) return 0;
  if (!named && Object.values(cell.fields).includes(word.value)) return 0;
  const a = numeric(word.value), b = numeric(actual);
  return (misfits[word.name] ?? 1) * (a && b ? Math.abs(Math.log2(a / b)) : word.name in misfits ? 1 : 4);
};
const wordOf = (text) => {
  const [name, value] = text.includes("=") ? text.split(/=(.*)/s) : [text, ""];
  const term = Object.keys(misfits).find((each) => cells.some((cell) => has(cell, each, value || text)));
  const field = value && cells.some((cell) => name in cell.fields);
  const word = field ? { text, name, value } : { text, name: value ? name : term ?? "", value: value || text };
  const fits = (field && numeric(value) !== null) || cells.some((cell) => !misfit(word, cell));
  return fits ? word : { ...word, unknown: true };
};
const formatOf = (words) => {
  const kinds = words.filter((word) => word.name === "kind").map((word) => word.value);
  const rows = cells.filter((cell) => kinds.every((kind) => has(cell, "kind", kind))).map((cell) => cell.row)
    .filter((row) => row.split(" ").every((term) => kinds.includes(term)));
  const value = rows.reduce((longest, row) => (row.length > longest.length ? row : longest), "");
  return value ? [{ text: "format=", name: "format", value }] : [];
};
const compare = (a, b) => {
  const i = a.findIndex((part, at) => part !== b[at]);
  return i < 0 ? 0 : a[i] - b[i];
};
const find = (query) => {
  const words = wordsOf(query).map(wordOf), unknown = words.find((word) => word.unknown);
  if (!words.length || unknown) return { words, unknown, cells: [] };
  words.push(...formatOf(words));
  const distance = (cell) => [words.reduce((total, word) => total + misfit(word, cell), 0), +!cell.verdict, -cell.gain];
  const ranked = cells.map((cell) => [distance(cell), cell]).sort((a, b) => compare(a[0], b[0])).map(([, cell]) => cell);
  const differing = (cell) => words.filter((word) => misfit(word, cell));
  const fitting = ranked.filter((cell) => !differing(cell).length);
  if (fitting.length) return { words, cells: fitting };
  const [nearest] = ranked, missed = differing(nearest);
  return {
    words,
    cells: [nearest],
    differs: missed.map((word) => word.name ? `${word.name} ${actualOf(word, nearest) || nearest.terms[word.name] || "another problem"} in place of ${word.value}` : `no ${word.text}`),
    command: measure(nearest, missed),
  };
};
const measure = (nearest, missed) => {
  let trial = nearest.commands.at(-1);
  for (const word of missed.filter((each) => each.name !== "gpu")) {
    const field = new RegExp(` ${word.name}=\\S+`);
    if (!field.test(trial) || ["op", "format"].includes(word.name)) return "";
    trial = trial.replace(field, ` ${word.name}=${word.value}`);
  }
  return trial.startsWith("sparsebench try") ? trial : "";
};

// The page: the first cell in full, the others as lines.
const form = document.querySelector("main form.find"), box = form.elements.q, answer = document.getElementById("finds");
const link = (cell, text) => Object.assign(make("a", text), { href: `${cell.run}/index.html#case-${cell.case}` });
const line = (text) => {
  const paragraph = make("p", "", make("code", text));
  copyable(paragraph.firstChild);
  return paragraph;
};
const card = (cell) => {
  const gain = Object.assign(make("p", "", make("b", cell.answer)), { className: "finding" });
  const where = make("p", `${cell.winner}, ${cell.measured}${cell.verdict ? "" : ", a look"}${cell.settled ? "" : ", not settled"}. `, link(cell, "The run"));
  const configuration = make("p", `Configuration: ${cell.configuration || "none"}.`);
  configuration.className = "note";
  return make("section", "", make("h2", cell.head), gain, where, configuration, ...cell.commands.map(line));
};
const search = () => {
  const { words, unknown, cells: found, differs, command } = find(box.value);
  const parts = [];
  if (unknown) parts.push(make("p", `No published cell has “${unknown.text}”. Write a GPU, an op, a format, a kernel, 4096x4096, m=64 or 90 %. “sparsebench new-gpu” measures a GPU without results.`));
  if (differs) {
    parts.push(make("p", `Not measured. The nearest cell has ${differs.join("; ")}.`));
    if (command) parts.push(make("p", "To measure it:"), line(command));
  }
  if (found.length) parts.push(card(found[0]));
  if (found.length > 1) {
    const rest = found.slice(1, most), list = make("ul", "");
    for (const cell of rest) list.append(make("li", "", link(cell, cell.head), make("span", ` ${cell.answer}: ${cell.winner}`)));
    const more = found.length - 1 - rest.length;
    parts.push(make("h2", `${found.length} cells fit`), list, ...(more ? [make("p", `${more} more: add a word.`)] : []));
  }
  answer.replaceChildren(...parts);
  return words;
};
box.value = new URLSearchParams(location.search).get("q") ?? "";
box.addEventListener("input", () => {
  history.replaceState(null, "", `?${new URLSearchParams({ q: box.value })}`);
  search();
});
form.addEventListener("submit", (event) => event.preventDefault());
search();
