// Draws what the page holds: figures when they come into view, themes, lists to choose from, and what-if answers.
// Names come from whoever wrote the run: they become text (textContent), never markup.
"use strict";

const root = document.documentElement;
const byId = (id) => document.getElementById(id);
const data = (id) => JSON.parse(byId(id).textContent);
const templates = data("templates");
const config = {
  responsive: true,
  displaylogo: false,
  plotlyServerURL: "", // the button that asks for it is removed by the templates
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
};

// -- themes

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches);
let printing = false;
const template = () => templates[dark() && !printing ? "dark" : "light"];
const drawn = () => [...document.querySelectorAll(".js-plotly-plot")];

function restyle() {
  for (const canvas of drawn()) Plotly.relayout(canvas, { template: template() });
}

function showTheme() {
  byId("theme").textContent = dark() ? "Light theme" : "Dark theme";
  byId("theme").setAttribute("aria-label", dark() ? "Use the light theme" : "Use the dark theme");
}

byId("theme").addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  try {
    localStorage.setItem("plimsoll-theme", root.dataset.theme);
  } catch (error) {
    // No storage: the choice holds for this page.
  }
  showTheme();
  restyle();
});
systemIsDark.addEventListener("change", () => {
  showTheme();
  restyle();
});
showTheme();

// -- text: 2^-14 with its exponent raised, as nodes

function powers(text) {
  return text.split(/\b(2\^-?\d+)/).map((part, i) => {
    if (i % 2 === 0) return document.createTextNode(part);
    const raised = document.createElement("sup");
    raised.textContent = part.slice(2).replace("-", "\u2212");
    const both = document.createElement("span");
    both.append("2", raised);
    return both;
  });
}

// -- figures

function draw(plot, key = plot.dataset.figure) {
  const { title, subtitle, height, figure } = data(key);
  const canvas = plot.querySelector(".canvas");
  plot.dataset.figure = key;
  plot.dataset.drawn = key;
  plot.querySelector(".title").replaceChildren(...powers(title));
  plot.querySelector(".subtitle").replaceChildren(...powers(subtitle));
  canvas.setAttribute("aria-label", `${title}. ${subtitle}`);
  canvas.style.height = `${height}px`;
  // The legend keeps to the top of the canvas, above what stands over the plot.
  const legend = { ...figure.layout.legend, yref: "container", y: 1, yanchor: "top" };
  const layout = { ...figure.layout, legend, template: template(), autosize: true, height };
  return Plotly.react(canvas, figure.data, layout, config);
}

const waiting = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter((each) => each.isIntersecting)) {
      waiting.unobserve(entry.target);
      if (!entry.target.dataset.drawn) draw(entry.target);
    }
  },
  { rootMargin: "300px" },
);
// The verdict is painted before the first figure is drawn.
requestAnimationFrame(() =>
  setTimeout(() => {
    for (const plot of document.querySelectorAll(".plot")) waiting.observe(plot);
  }, 0),
);

for (const select of document.querySelectorAll("select[data-shows]")) {
  const plot = document.querySelector(`#shown-${select.dataset.shows} .plot`);
  select.addEventListener("change", () => {
    if (select.value) draw(plot, select.value);
  });
}

const find = byId("find");
if (find) {
  const list = byId("tensors");
  const all = [...list.options];
  find.addEventListener("input", () => {
    const wanted = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = all.filter((option) => {
      const text = `${option.textContent} ${option.title}`.toLowerCase();
      return wanted.every((word) => text.includes(word));
    });
    list.replaceChildren(...found);
    byId("found").textContent = wanted.length ? `${found.length} of ${all.length}` : "";
  });
  find.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "ArrowDown") return;
    if (!list.options.length) return;
    event.preventDefault();
    list.selectedIndex = 0;
    list.focus();
    list.dispatchEvent(new Event("change"));
  });
}

// -- printing: everything open and drawn, on light paper, as wide as the sheet

const SHEET = 680;
let opened = [];
const beforePrint = [];
addEventListener("beforeprint", () => {
  printing = true;
  for (const prepare of beforePrint) prepare();
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const each of opened) each.open = true;
  for (const plot of document.querySelectorAll(".plot")) if (!plot.dataset.drawn) draw(plot);
  for (const canvas of drawn()) Plotly.relayout(canvas, { template: template(), width: SHEET, autosize: false });
});
addEventListener("afterprint", () => {
  printing = false;
  for (const each of opened) each.open = false;
  for (const canvas of drawn()) Plotly.relayout(canvas, { template: template(), width: null, autosize: true });
});

// -- what if

const percent = (share) => {
  if (share === 0) return "0 %";
  if (share >= 1) return `${Math.round(100 * share)} %`;
  if (share > 0.99) return "over 99 %";
  return share < 1e-4 ? "under 0.01 %" : `${Number((100 * share).toPrecision(2))} %`;
};
const exponent = (k) => `2^${k}`;
const ABOUT = 1 / 65535; // of a tensor's share: estimated as none, but it may be some

// As plimsoll/diagnosis/what_if/result.py writes intervals, and the live page's words.js.
const estimate = (share, most) => (share === 0 && most > 0 ? `about ${percent(0)}` : percent(share));
const interval = (share, least, most) => {
  const [from, to] = [percent(least), percent(most)];
  return `${estimate(share, most)}${from === to ? "" : ` (${from} to ${to})`}`;
};
const scales = ([low, high]) => (low === high ? exponent(low) : `${exponent(low)} to ${exponent(high)}`);

function shares(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true) / 65535);
}

function cell(text, name) {
  const made = document.createElement("td");
  if (name) made.className = name;
  if (typeof text === "string") made.append(...powers(text));
  else made.append(text);
  return made;
}

function named(name) {
  const made = cell("", "long");
  made.textContent = name;
  return made;
}

function whatIf() {
  const { low, high, formats } = data("answers");
  const count = high - low + 1;
  for (const each of formats) {
    each.lost = shares(each.lost);
    each.overflow = shares(each.overflow);
  }
  const format = byId("format");
  const slider = byId("shift");
  const most = 15;
  let whole = false;

  const part = (k) => (100 * (Math.min(Math.max(k, low), high) - low)) / (high - low);

  function bar(window, shift) {
    const span = document.createElement("span");
    span.className = "span";
    if (window) {
      const inside = document.createElement("i");
      inside.style.left = `${part(window[0])}%`;
      inside.style.right = `${100 - part(window[1])}%`;
      span.append(inside);
    }
    const mark = document.createElement("b");
    mark.style.left = `${part(shift)}%`;
    if (!window || shift < window[0] || shift > window[1]) mark.className = "out";
    span.append(mark);
    return span;
  }

  function between(each, name, at) {
    return interval(...["", "_low", "_high"].map((bound) => each.overall[name + bound][at]));
  }

  function table(each, shift, at) {
    const order = each.names.map((_, i) => i);
    const sure = (share) => (share === ABOUT ? 0 : share);
    const harm = (i) => sure(each.lost[i * count + at]) + sure(each.overflow[i * count + at]);
    const room = (i) => (each.windows[i] ? each.windows[i][1] - each.windows[i][0] : -1);
    order.sort((a, b) => harm(b) - harm(a) || room(a) - room(b));
    const rows = (whole ? order : order.slice(0, most)).map((i) => {
      const window = each.windows[i];
      const row = document.createElement("tr");
      row.append(
        named(each.names[i]),
        cell(estimate(sure(each.lost[i * count + at]), each.lost[i * count + at]), "number"),
        cell(estimate(sure(each.overflow[i * count + at]), each.overflow[i * count + at]), "number"),
        cell(each.block ? (window ? "works" : "loses too much") : window ? scales(window) : "none", "number"),
        cell(bar(window, shift)),
      );
      return row;
    });
    document.querySelector("#rows tbody").replaceChildren(...rows);
    const more = byId("rows-more");
    more.replaceChildren();
    if (order.length > most) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = whole ? `Show the worst ${most} only` : `Show all ${order.length} tensors`;
      button.addEventListener("click", () => {
        whole = !whole;
        show();
        more.querySelector("button").focus();
      });
      more.append(button);
    }
    if (each.left_out > 0) more.append(` ${each.left_out} tensors that fare better are left out of this file.`);
  }

  function curve(each, shift) {
    const x = Array.from({ length: count }, (_, i) => low + i);
    const line = (name, words, dash) => ({
      type: "scatter", mode: "lines", name: words, x, y: each.overall[name], line: { dash, width: 2 },
      hovertemplate: `${words} at 2^%{x}: %{y:.2%}<extra></extra>`,
    });
    const ticks = x.filter((k) => k % 8 === 0);
    const layout = {
      template: template(), height: 260, autosize: true, margin: { l: 56, r: 16, t: 28, b: 44 },
      legend: { orientation: "h", x: 0, yref: "container", y: 1, yanchor: "top" },
      xaxis: {
        title: { text: "scale" }, range: [low - 0.5, high + 0.5], fixedrange: true, zeroline: false,
        tickvals: ticks, ticktext: ticks.map((k) => `2<sup>${String(k).replace("-", "\u2212")}</sup>`),
      },
      yaxis: { title: { text: "share of values" }, tickformat: ".0%", range: [-0.03, 1.03], fixedrange: true, zeroline: false },
      shapes: [{ type: "line", x0: shift, x1: shift, y0: 0, y1: 1, yref: "paper", line: { color: "#7d8791", width: 2 } }],
    };
    Plotly.react(byId("curve"), [line("lost", "lost", "solid"), line("overflow", "overflow", "dash")], layout, config);
  }

  function show() {
    const each = formats[Number(format.value)];
    const shift = Number(slider.value);
    const at = shift - low;
    byId("power").replaceChildren(...powers(exponent(shift)));
    slider.setAttribute("aria-valuetext", `2 to the power ${shift}`);
    const told = `${each.format.toUpperCase()} at ${exponent(shift)}: lost ${between(each, "lost", at)}, `;
    byId("told").replaceChildren(...powers(`${told}overflow ${between(each, "overflow", at)}.`));
    table(each, shift, at);
    if (near) curve(each, shift);
  }

  function best() {
    slider.value = formats[Number(format.value)].best;
    show();
  }

  let near = false;
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    near = true;
    show();
  }, { rootMargin: "300px" }).observe(byId("curve"));
  beforePrint.push(() => {
    near = true;
    show();
  });
  slider.addEventListener("input", show);
  format.addEventListener("change", best);
  byId("best").addEventListener("click", best);
  show();
}

if (byId("answers")) whatIf();
