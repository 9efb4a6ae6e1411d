// Before reveal.js starts, each slide is cut into pages that fit, measured with the fonts of this machine.
const HEIGHT = 720, SMALLEST = 0.7;  // how far a wide table of printed text may shrink before its lines are wrapped
const CODE = ".jp-InputArea-editor", OUTPUT = ".jp-OutputArea-child";
const BLOCKS = `.jp-RenderedMarkdown > *, ${CODE}, ${OUTPUT}`;

function tooTall(page) {
  page.classList.add("measured");
  const height = page.offsetHeight;
  page.classList.remove("measured");
  return height > HEIGHT;
}

function newPage(before, title) {
  const page = document.createElement("section");
  before.after(page);
  addTitle(page, title);
  return page;
}

function addTitle(page, title) {
  const line = document.createElement("p");
  line.className = "running";
  line.textContent = title;
  page.append(line);
}

// Headings and "as follows:" go with what comes after them, and code with its output.
function belongsTo(next, block) {
  if (block.matches(CODE)) return next.matches(OUTPUT);
  return block.matches("h1, h2, h3") || block.textContent.trimEnd().endsWith(":");
}

// Moves what does not fit from the end of a table, a list or printed text into a second one. null: it cannot be cut.
function cut(page, block) {
  const rest = block.cloneNode(true);
  const find = (root) => root.matches("ul, ol") ? root : root.querySelector("tbody, .jp-RenderedText pre");
  const [kept, moved] = [find(block), find(rest)];
  if (!kept) return null;
  const isText = kept.tagName === "PRE";
  const units = isText ? kept.textContent.trim().split("\n") : [...kept.children];
  const others = [...moved.children];
  let count = units.length;
  while (count > 1 && tooTall(page)) {
    count -= 1;
    if (isText) kept.textContent = units.slice(0, count).join("\n");
    else units[count].remove();
  }
  if (isText) moved.textContent = units.slice(count).join("\n");
  else others.slice(0, count).forEach((unit) => unit.remove());
  if (moved.tagName === "OL") moved.start = kept.start + count;
  return count < units.length ? rest : null;
}

// Puts a block at the end of a page, or else on a new one; returns the page to go on with.
function place(page, block, title) {
  page.append(block);
  if (!tooTall(page)) return page;
  const all = [...page.children];
  let first = all.length - 1;  // the first of those that belong together
  while (first > 0 && belongsTo(all[first], all[first - 1])) first -= 1;
  const others = all.slice(0, first).filter((each) => !each.matches(".running, aside"));
  if (others.length || (all.length > 2 && !block.matches("table, ul, ol"))) {
    const carried = others.length ? all.slice(first, -1) : [];
    const next = newPage(page, title);
    next.append(...carried, block);
    if (!tooTall(next)) return next;
    page.append(...carried);  // too tall together: back to where they were
    page = next;
  }
  const rest = cut(page, block);
  return rest ? place(newPage(page, title), rest, title) : page;
}

// A table of printed text that is a little too wide gets smaller type; anything wider is wrapped.
function shrinkWideText(pre) {
  pre.style.whiteSpace = "pre";
  const ratio = pre.clientWidth / pre.scrollWidth;
  if (ratio < 1 && ratio > SMALLEST) pre.style.fontSize = `${Math.floor(160 * ratio) / 10}px`;
  else pre.style.whiteSpace = "";
}

function paginate(stack) {
  stack.classList.add("measured");  // only what is displayed has a height
  let title = "";
  for (const section of [...stack.children]) {
    section.classList.add("measured");
    section.querySelectorAll(".jp-RenderedText pre").forEach(shrinkWideText);
    const blocks = [...section.querySelectorAll(BLOCKS)];
    section.classList.remove("measured");
    section.replaceChildren();
    let page = section;
    for (const block of blocks) {
      if (block.matches("h1, h2, h3")) title = block.textContent;
      else if (!page.children.length) addTitle(page, title);
      page = place(page, block, title);
    }
  }
  stack.classList.remove("measured");
}

document.querySelectorAll(".slides > section").forEach(paginate);
Reveal.initialize({
  width: 1280, height: HEIGHT, margin: 0, center: false, hash: true, slideNumber: "c/t", transition: "none",
  plugins: [RevealNotes],
});
