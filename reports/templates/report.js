// The address holds the chosen view, the filters and the order: #m=16&block=64&q=bsr&sort=-speedup.
// A plain fragment (#cases, #case-1a2b) names a place on the page; folded parts around it open.
const state = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
const remember = (changes) => {
  const now = state();
  for (const [name, value] of Object.entries(changes)) value ? now.set(name, value) : now.delete(name);
  if (location.protocol === "about:") return; // a page inside a notebook has no address
  history.replaceState(null, "", now.size ? `#${now}` : location.pathname + location.search);
};

// The first screen: show the view that matches the selectors best, and say so if none matches all.
// Numbers that differ count by their ratio, less than any match: 3,000 tokens show 4,096, not 64.
const choose = document.querySelector(".choose");
const views = [...document.querySelectorAll(".view[data-choice]")];
const choices = views.map((view) => JSON.parse(view.dataset.choice));
const likeness = (a, b) => (a === b ? 1 : 0.01 / (1 + Math.abs(Math.log(parseFloat(a) / parseFloat(b)))) || 0);
const show = (wanted, changed) => {
  const fit = (choice) =>
    Object.entries(wanted).reduce((sum, [name, value]) => sum + likeness(choice[name], value), 0) +
    (changed && choice[changed] === wanted[changed] ? 100 : 0);
  const scores = choices.map(fit);
  const best = scores.indexOf(Math.max(...scores));
  views.forEach((view, i) => (view.hidden = i !== best));
  for (const [name, value] of Object.entries(choices[best])) if (choose.elements[name]) choose.elements[name].value = value;
  const missed = Object.entries(wanted).filter(([name, value]) => choices[best][name] !== value);
  const said = missed.map(([name, value]) => `${name} = ${value}`).join(", ");
  choose.querySelector("output").textContent = said ? `Nothing was measured with ${said}. This is the nearest choice.` : "";
  return choices[best];
};
if (choose) {
  choose.addEventListener("submit", (event) => event.preventDefault());
  choose.addEventListener("change", (event) => {
    const wanted = Object.fromEntries(new FormData(choose));
    remember(show(wanted, event.target.name));
  });
}
const restore = () => {
  const known = new Set(choices.flatMap((choice) => Object.keys(choice)));
  const wanted = [...state()].filter(([name]) => known.has(name));
  if (choose && wanted.length) show(Object.fromEntries(wanted));
};

const fragment = () => {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // a lone %, which names no place
  }
};

// A link to a place opens the folded parts around it.
const open = () => {
  restore();
  const place = location.hash.includes("=") ? null : document.getElementById(fragment());
  if (!place) return;
  const view = views.indexOf(place); // without this script, the style shows the view that is the target
  if (view >= 0) return location.replace(`#${new URLSearchParams(choices[view])}`);
  for (let at = place; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  for (const own of place.querySelectorAll(":scope > details")) own.open = true;
  place.scrollIntoView({ block: place.tagName === "TR" ? "center" : "start" });
};
addEventListener("hashchange", open);

// Show the value of the marker nearest to the pointer.
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip", hidden: true }));
document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest?.("svg");
  let best = null, least = 22;
  for (const mark of svg ? svg.querySelectorAll(":has(> title)") : []) {
    if (!mark.checkVisibility()) continue;
    const box = mark.getBoundingClientRect();
    const far = Math.hypot(event.clientX - box.x - box.width / 2, event.clientY - box.y - box.height / 2);
    if (far < least) [best, least] = [mark, far];
  }
  tip.hidden = !best;
  if (!best) return;
  tip.textContent = best.textContent;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 14}px`;
});

// On a narrow screen the style turns table lines into paragraphs: values carry their heads, dashes are hidden.
for (const table of document.querySelectorAll(".scroll > table:not(.map, .runs)")) {
  if (!table.tHead) continue;
  table.classList.add("stacked");
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, i) => (cell.dataset.head = heads[i]));
    for (const cell of row.cells) cell.classList.toggle("vacant", ["", "–"].includes(cell.textContent.trim()));
  }
}

// Make scrolling parts reachable by keyboard, and open folded parts for printing, without every case.
const reachable = () => {
  const regions = {};
  for (const box of document.querySelectorAll(".scroll")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) {
      const label = box.closest("section")?.querySelector("h2")?.textContent ?? "a table";
      const count = (regions[label] = (regions[label] ?? 0) + 1);
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", count > 1 ? `${label} (${count})` : label);
    }
  }
};
document.addEventListener("toggle", reachable, true);
addEventListener("resize", reachable);
const folded = () => document.querySelectorAll("details:not([open], #cases *)");
let closed = [];
addEventListener("beforeprint", () => (closed = [...folded()]).forEach((each) => (each.open = true)));
addEventListener("afterprint", () => closed.forEach((each) => (each.open = false)));

// A form above a table: rows with the chosen values and every word stay, and the address keeps the choice.
for (const form of document.querySelectorAll("form.narrow")) {
  const rows = [...form.closest("main").querySelectorAll("tbody tr")], fields = [...form.elements].filter((field) => field.name);
  const narrow = () => {
    const chosen = fields.filter((field) => field.value), values = chosen.filter((field) => field.name !== "q");
    const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows)
      row.hidden = !(values.every((field) => row.dataset[field.name.toLowerCase()] === field.value) && words.every((word) => row.textContent.toLowerCase().includes(word)));
    const count = rows.filter((row) => !row.hidden).length;
    form.querySelector("output").textContent = chosen.length ? `${count} of ${rows.length}${count ? "" : ": no row matches; remove a word or a choice."}` : "";
    remember(Object.fromEntries(fields.map((field) => [field.name, field.value])));
  };
  for (const [name, value] of state()) if (form.elements[name]) form.elements[name].value = value;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", narrow);
  narrow();
}

// The table of every case: sort by a head, find words, filter a column, and keep all of it in the address.
const units = { ms: 1e3, s: 1e6 }; // of a time, in µs
const number = (text) => parseFloat(text.replaceAll(",", "").replace("–", "")) * (units[/\d (m?s)$/.exec(text)?.[1]] ?? 1);
const fits = (wanted, text, numeric) => {
  const span = wanted.match(/^(-?[\d.]+)\.\.(-?[\d.]+)$/), limit = wanted.match(/^([<>]=?)\s*(-?[\d.]+)$/);
  const value = number(text);
  if (span) return value >= +span[1] && value <= +span[2];
  if (limit) return { "<": value < +limit[2], ">": value > +limit[2], "<=": value <= +limit[2], ">=": value >= +limit[2] }[limit[1]];
  if (numeric && wanted !== "" && !Number.isNaN(+wanted)) return value === +wanted;
  return text.toLowerCase().includes(wanted.toLowerCase());
};

// A cell of a map opens a card: all contenders of its problem in order, and the commands to run them.
const make = (tag, text, ...children) => {
  const element = Object.assign(document.createElement(tag), { textContent: text });
  element.append(...children);
  return element;
};
// A line to copy has a button for it; the file of a page without TLS may not write the clipboard.
const copyable = (code) => {
  if (!navigator.clipboard) return code;
  const button = make("button", "copy");
  Object.assign(button, { type: "button", className: "copy" });
  button.setAttribute("aria-label", `copy ${code.textContent}`);
  button.addEventListener("click", () => navigator.clipboard.writeText(code.textContent).then(() => (button.textContent = "copied")));
  code.after(" ", button);
  return code;
};
document.querySelectorAll("code.copied").forEach(copyable);
const showCards = (run, rows, texts, names) => {
  const at = (cells, name) => cells[names.indexOf(name)] ?? run.same[name] ?? "–";
  const value = (cells, name) => (name === "sparsity" ? String(+(number(at(cells, name)) / 100).toFixed(6)) : at(cells, name).replaceAll(",", ""));
  const words = (cells, fields) => fields.filter((name) => at(cells, name) !== "–").map((name) => `${name}=${value(cells, name)}`).join(" ");
  const place = (cells) => [...run.fields, "scope", "cache"].map((name) => at(cells, name)).join("|");
  const card = (row) => {
    const own = texts[rows.indexOf(row)], here = place(own);
    const rivals = texts.filter((cells) => place(cells) === here && at(cells, "time, µs") !== "–" && !at(cells, "contender").endsWith("(twin)"));
    rivals.sort((a, b) => number(at(a, "time, µs")) - number(at(b, "time, µs")));
    const box = make("aside");
    box.className = "card";
    box.tabIndex = -1;
    const close = make("button", "close");
    close.addEventListener("click", () => box.remove());
    box.addEventListener("keydown", (event) => event.key === "Escape" && box.remove());
    const fields = run.fields.filter((name) => at(own, name) !== "–").map((name) => `${name} ${at(own, name)}`);
    const table = Object.assign(make("table"), { className: "stacked" }), body = make("tbody");
    const heads = ["contender", "time, µs", "speedup", "of limit, %", "configuration"];
    table.append(make("thead", "", make("tr", "", ...heads.map((head) => make("th", head)))), body);
    for (const cells of rivals) {
      const link = make("a", at(cells, "contender"));
      link.href = `#${rows[texts.indexOf(cells)].id}`;
      const values = [link, at(cells, "time, µs"), at(cells, "speedup"), at(cells, "of limit, %"), at(cells, "configuration")];
      body.append(make("tr", "", ...values.map((each) => make("td", "", each))));
      [...body.lastChild.cells].forEach((cell, i) => (cell.dataset.head = i ? heads[i] : ""));
    }
    const only = at(own, "sparsity") === "–" && at(own, "source") !== "–" ? `case=${at(own, "case")}` : words(own, run.select);
    const [name, ...rest] = at(own, "contender").split(" "), [named, format] = name.split("/").reverse();
    const chosen = named === "default" && /(?:^|, )kernel (?!dense\b)(\w+)/.exec(at(own, "configuration"));
    const kernel = chosen ? chosen[1] : named;
    const stored = kernel === "default" ? [`format=${format}`] : [], options = rest.filter((word) => word.includes("="));
    const trial = ["sparsebench try", kernel, ...stored, words(own, run.fields), ...options].join(" ");
    const commands = [`sparsebench run ${run.suite}${only ? ` --only "${only}"` : ""}`, trial];
    box.append(close, make("h3", fields.join(" · ")), make("div", "", table), ...commands.map((line) => make("p", "", make("code", line))));
    box.querySelectorAll("p > code").forEach(copyable);
    box.children[2].className = "scroll";
    return box;
  };
  const reveal = (row, pair) => {
    document.querySelector("aside.card")?.remove();
    const box = card(row);
    pair.before(box);
    box.focus({ preventScroll: true });
    box.scrollIntoView({ block: "nearest" });
  };
  for (const cell of document.querySelectorAll("a[data-cell]")) {
    cell.addEventListener("click", (event) => {
      const row = document.getElementById(cell.hash.slice(1));
      if (!row) return;
      event.preventDefault();
      reveal(row, cell.closest(".pair"));
    });
  }
  const linked = rows.find((row) => row.id && `#${row.id}` === location.hash), pair = document.querySelector(".view:not([hidden]) .pair");
  if (linked && pair) reveal(linked, pair);
};
for (const table of document.querySelectorAll("table.sortable")) {
  const form = table.closest("section").querySelector("form.filter"), find = form.elements.q;
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const names = heads.map((head) => head.textContent), numeric = heads.map((head) => head.className === "num");
  const texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent));
  const run = JSON.parse(form.dataset.run);
  const column = (name) => {
    const exact = names.findIndex((own) => own.toLowerCase() === name.toLowerCase());
    return exact >= 0 ? exact : names.findIndex((own) => own.toLowerCase().startsWith(name.toLowerCase()));
  };
  const line = table.tHead.insertRow();
  const boxes = names.map((name, i) => {
    const box = line.insertCell().appendChild(document.createElement("input"));
    Object.assign(box, { type: "search", name: `f.${name}`, size: 6 });
    box.setAttribute("aria-label", `filter ${name}`);
    box.setAttribute("form", (form.id ||= "filter"));
    return box;
  });
  const constants = Object.entries(run.same);
  const word = (cells, wanted) => {
    const [, name, rest] = wanted.match(/^([^:]+):(.+)$/) ?? [];
    const shared = constants.find(([own]) => own.toLowerCase() === name?.toLowerCase()); // "m" is not the column "mark"
    if (shared) return fits(rest, shared[1], !Number.isNaN(+shared[1]));
    if (name && column(name) >= 0) return fits(rest, cells[column(name)], numeric[column(name)]);
    const same = constants.some(([, value]) => value.toLowerCase() === wanted.toLowerCase());
    if (!Number.isNaN(+wanted)) return same || cells.some((cell) => cell.replaceAll(",", "") === wanted);
    return same || cells.some((cell) => cell.toLowerCase().includes(wanted.toLowerCase()));
  };
  const filter = () => {
    const words = find.value.replace(/(\d)\s+%/g, "$1%").split(/\s+/).filter(Boolean).map((each) => each.replace(/(\d)%$/, "$1 %"));
    const asked = boxes.map((box, i) => [box.value.trim(), i]).filter(([wanted]) => wanted);
    let count = 0;
    rows.forEach((row, i) => {
      const shown = words.every((each) => word(texts[i], each)) && asked.every(([wanted, j]) => fits(wanted, texts[i][j], numeric[j]));
      row.hidden = !shown;
      count += shown;
    });
    form.querySelector("output").textContent = count ? `${count} of ${rows.length}` : `0 of ${rows.length}: no case matches; remove a word or a filter.`;
  };
  const sort = (index, down) => {
    heads.forEach((head, i) => (i === index ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    const keys = texts.map((cells) => (numeric[index] ? number(cells[index]) : cells[index]));
    const missing = (key) => Number.isNaN(key) || key === "–";
    const compare = (a, b) => {
      if (missing(keys[a]) || missing(keys[b])) return missing(keys[a]) - missing(keys[b]);
      const order = numeric[index] ? keys[a] - keys[b] : keys[a].localeCompare(keys[b], "en", { numeric: true });
      return down ? -order : order;
    };
    body.append(...rows.map((_, i) => i).sort(compare).map((i) => rows[i]));
  };
  heads.forEach((head, index) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      sort(index, down);
      remember({ sort: (down ? "-" : "") + names[index] });
    });
  });
  const changed = () => {
    filter();
    remember({ q: find.value, ...Object.fromEntries(boxes.map((box) => [box.name, box.value])) });
  };
  for (const box of [find, ...boxes]) box.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(changed));
  const recall = () => {
    const now = state(), sorted = now.get("sort");
    for (const box of [find, ...boxes]) box.value = now.get(box.name) ?? "";
    if (sorted) sort(column(sorted.replace(/^-/, "")), sorted.startsWith("-"));
    if (sorted || now.has("q") || boxes.some((box) => box.value)) table.closest("details").open = true;
    filter();
  };
  addEventListener("hashchange", recall);
  recall();
  showCards(run, rows, texts, names);
}

// A list of runs shows those that have every word; a word may be in the heading of their GPU.
const list = document.querySelector("form.rows");
if (list) {
  const box = list.elements.q, runs = [...document.querySelectorAll("table.runs tbody tr")];
  const text = (run) => `${run.closest("section").querySelector("h2").textContent} ${run.textContent}`.toLowerCase();
  const narrow = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const run of runs) run.hidden = !words.every((word) => text(run).includes(word));
    for (const group of document.querySelectorAll("section:has(table.runs)")) group.hidden = !group.querySelector("tbody tr:not([hidden])");
    list.querySelector("output").textContent = words.length ? `${runs.filter((run) => !run.hidden).length} of ${runs.length}` : "";
  };
  box.value = state().get("q") ?? "";
  box.addEventListener("input", () => { narrow(); remember({ q: box.value }); });
  list.addEventListener("submit", (event) => event.preventDefault());
  narrow();
}

reachable();
open();
// A link to a case shows its card, after the browser has scrolled to the line of the case.
addEventListener("load", () => setTimeout(() => document.querySelector("aside.card")?.scrollIntoView({ block: "center" }), 50));
