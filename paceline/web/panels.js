// Panels of both pages. A panel draws a snapshot of the scheduler (scheduler/snapshot.py) and is stateless. `lit` is the
// request state that is highlighted, if one is.
import { css, html, Legend, seconds, Title, useCanvas, useLayoutEffect, useMemo, useRef, useState, whole } from "./parts.js";

const FREE = 0, CACHED = 1, SHARED = 2, PINNED = 3, OWNED = 4; // as in scheduler/snapshot.py
const USES = { waiting: 1, prefill: 2, decoding: 4 };
const OWNERS = ["#0072b2", "#d55e00", "#009e73", "#b0578d", "#2a8fc4", "#a87400", "#6a51a3", "#8c564b", "#3f7f3f", "#c2410c"];

const ownerColour = slot => OWNERS[slot % OWNERS.length];
const plural = (count, one, many = one + "s") => `${whole(count)} ${count === 1 ? one : many}`;
/** A, B, … Z, A2, B2, …: names of the shared prefixes. */
export const prefixName = number => String.fromCharCode(65 + (number % 26)) + (number < 26 ? "" : 1 + Math.floor(number / 26));
const rowClass = (lit, phase) => "row" + (!lit ? "" : lit === phase ? " lit" : " dim");
const Tenant = ({ name, many }) => many && html`<span class="tag" title=${`tenant ${name}`} data-tenant=${name}>${name}</span>`;

const HATCH = "background:repeating-linear-gradient(135deg,var(--cached) 0 3px,transparent 3px 5px);border-color:var(--line)";
const DOTS = "background:radial-gradient(var(--soft) 0 1.4px,transparent 1.8px) 0 0/4.5px 4.5px;border-color:var(--line)";

// ------------------------------------------------------------------ the KV cache

function decode(text, kind) {
  return new kind(Uint8Array.from(atob(text), character => character.charCodeAt(0)).buffer);
}

/** For a KV cache too large to draw page by page: cells of each kind in proportion. */
function proportions(memory, cells) {
  const codes = new Uint16Array(cells);
  const counts = [[OWNED, memory.owned], [SHARED, memory.shared], [PINNED, memory.pinned], [CACHED, memory.cached]];
  let at = 0;
  for (const [code, count] of counts) {
    const end = Math.min(cells, at + Math.round((count / memory.pages) * cells));
    codes.fill(code, at, end);
    at = end;
  }
  return codes;
}

function gridShape(width, count) {
  let size = 22;
  while (size > 4 && Math.ceil(count / Math.floor(width / size)) * size > 190) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.ceil(count / columns) };
}

/** Whether each page is highlighted. Of finished requests: the cached pages that no other request uses or hits. */
function litPages(codes, uses, lit) {
  const bits = decode(uses, Uint8Array);
  return Array.from(codes, (code, page) => (lit === "finished" ? code === CACHED && !bits[page] : Boolean(bits[page] & USES[lit])));
}

function drawPage(pen, code, x, y, side, colours) {
  pen.fillStyle = colours.free; pen.fillRect(x, y, side, side);
  if (code === FREE) {
    pen.strokeStyle = colours.line; pen.strokeRect(x + .5, y + .5, side - 1, side - 1);
  } else if (code === CACHED) { // half a cell: in memory, but not in use
    pen.fillStyle = colours.cached;
    pen.beginPath(); pen.moveTo(x, y + side); pen.lineTo(x + side, y); pen.lineTo(x + side, y + side); pen.fill();
  } else if (code === SHARED || code === PINNED) {
    pen.fillStyle = colours.shared; pen.fillRect(x, y, side, side);
    if (side > 7) {
      pen.fillStyle = colours.card;
      if (code === PINNED) pen.fillRect(x + side * .3, y + side * .42, side * .4, side * .16);
      else { pen.beginPath(); pen.arc(x + side / 2, y + side / 2, side / 5, 0, 7); pen.fill(); }
    }
  } else {
    pen.fillStyle = colours.owner(code - OWNED); pen.fillRect(x, y, side, side);
    if (side >= 15 && colours.numbered) { pen.fillStyle = "#fff"; pen.fillText(code - OWNED, x + side / 2, y + side / 2 + .5); }
  }
}

export function Pages({ snapshot, lit = null, hint = "" }) {
  const { map, memory, running, uses } = snapshot;
  const codes = useMemo(() => (map ? decode(map, Uint16Array) : proportions(memory, 1024)), [map, memory]);
  const marked = useMemo(() => (lit && uses ? litPages(codes, uses, lit) : null), [codes, uses, lit]);
  const names = useMemo(() => new Map(running.map(one => [one.slot, one.id])), [running]);
  const [tip, setTip] = useState(null);
  const [ref, width] = useCanvas(
    width => { const { size, rows } = gridShape(width, codes.length); return rows * size; },
    (pen, width) => {
      const { size, columns } = gridShape(width, codes.length);
      const side = size - (size > 8 ? 2 : 1);
      const colours = { free: css("--free"), line: css("--line"), cached: css("--cached"), shared: css("--shared"), card: css("--card"),
        owner: map ? ownerColour : () => css("--accent"), numbered: Boolean(map) };
      const ink = css("--ink");
      pen.font = `600 ${Math.min(11, size - 8)}px system-ui, sans-serif`;
      pen.textAlign = "center"; pen.textBaseline = "middle";
      codes.forEach((code, index) => {
        const x = (index % columns) * size, y = Math.floor(index / columns) * size;
        pen.globalAlpha = marked && !marked[index] ? .25 : 1;
        drawPage(pen, code, x, y, side, colours);
        if (marked?.[index]) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, side - 2, side - 2); pen.lineWidth = 1; }
      });
      pen.globalAlpha = 1;
    }, [codes, marked]);
  const over = event => {
    const { size, columns } = gridShape(width, codes.length);
    const column = Math.floor(event.offsetX / size), index = Math.floor(event.offsetY / size) * columns + column;
    if (!map || column >= columns || index >= codes.length) return setTip(null);
    const code = codes[index];
    const what = ["free", "cached, used by no running request", "shared by several running requests", "pinned"][code] || `used by ${names.get(code - OWNED) || "slot " + (code - OWNED)} alone`;
    setTip({ x: event.clientX + 12, y: event.clientY + 12, text: `page ${index}: ${what}` });
  };
  const count = marked ? marked.filter(Boolean).length : 0;
  return html`<section class="card wide" data-panel="pages"><${Title} name="KV cache" title="Every page of the KV cache by use. A page holds the KV of page_size tokens of one prefix.">${whole(memory.pages)} pages ${hint}<//>
    <div><canvas ref=${ref} onMouseMove=${over} onMouseLeave=${() => setTip(null)} role="img" data-lit=${count}
      aria-label=${`pages: ${memory.owned} used by one request, ${memory.shared} shared, ${memory.cached} cached, ${memory.free} free${lit ? `; ${count} highlighted` : ""}`}></canvas></div>
    ${tip && html`<div class="tip" style=${`left:${tip.x}px;top:${tip.y}px`}>${tip.text}</div>`}
    <${Legend} entries=${[
      ["background:var(--accent)", map ? "one request (number: its slot)" : "one request", "pages that one running request uses", memory.owned, "owned"],
      ["background:radial-gradient(var(--card) 0 2.4px, var(--shared) 3px)", "shared", "pages of prefixes that several running requests use; each exists once", memory.shared, "shared"],
      memory.pinned > 0 && ["background:linear-gradient(var(--shared) 40%,var(--card) 40% 60%,var(--shared) 60%)", "pinned", "pages of pinned prefixes that no running request uses: they are not evicted", memory.pinned, "pinned"],
      ["background:linear-gradient(135deg,var(--free) 50%,var(--cached) 50%)", "cached", "pages of computed prefixes that no running request uses: kept for later requests, evicted when memory is needed", memory.cached, "cached"],
      ["background:var(--free);border-color:var(--line)", "free", "pages without content", memory.free, "free"]]} /></section>`;
}

/** Host memory behind the KV cache; nothing without one. */
export function Host({ snapshot }) {
  const { host, counters } = snapshot;
  if (!host) return null;
  return html`<section class="card wide" data-panel="host"><${Title} name="Host memory" title="Evicted pages are copied to host memory (spilled) and fetched back when a prompt needs them, where that is faster than computing them.">
      <span data-figure="host_used">${whole(host.used)}</span> of ${plural(host.pages, "page")} in use<//>
    <span class="bar" title=${`${whole(host.used)} of ${whole(host.pages)} host pages hold KV`}><i class="b-host" style=${`width:${(100 * host.used) / host.pages}%`}></i></span>
    <div class="legend">
      <span title="evicted pages copied to host memory since the start">spilled <b class="num" data-figure="spilled_pages">${whole(counters.spilled_pages)}</b> pages</span>
      <span title="prompt tokens fetched from host memory instead of computed, since the start">fetched <b class="num" data-figure="fetched_tokens">${whole(counters.fetched_tokens)}</b> tokens</span>
      <span title="pages dropped from host memory to make space, least recently used first, since the start">dropped <b class="num" data-figure="forgotten_pages">${whole(counters.forgotten_pages)}</b> pages</span>
      ${host.from_token > 0 && html`<span title="A page costs the same to fetch anywhere, and more to compute the later it is in a prompt.">kept from token ${whole(host.from_token)} on: earlier pages are faster to compute</span>`}
    </div></section>`;
}

// ------------------------------------------------------------------ the prefix tree

/** Lays out the tree: x is the token position, the height of a node is its number of leaves. */
function layoutTree(nodes) {
  const laid = nodes.map(([parent, tokens, state, running, waiting, prefix], index) =>
    ({ index, parent, tokens, state, running, waiting, prefix, children: [], start: 0, leaves: 0, top: 0 }));
  for (const node of laid) if (node.parent !== null) laid[node.parent].children.push(node);
  for (const node of laid) node.start = node.parent === null ? 0 : laid[node.parent].start + laid[node.parent].tokens;
  for (const node of [...laid].reverse()) node.leaves = node.children.length ? node.children.reduce((sum, child) => sum + child.leaves, 0) : 1;
  for (const node of laid) { let top = node.top; for (const child of node.children) { child.top = top; top += child.leaves; } }
  return laid;
}

const NODE_STYLES = {
  pinned: "fill:var(--shared);fill-opacity:.6", cached: "fill:var(--cached);fill-opacity:.55",
  host: "fill:none;stroke:var(--soft);stroke-dasharray:1.5 2.5;stroke-width:1.5", ghost: "fill:none;stroke:var(--warm);stroke-dasharray:4 3",
};
const NODE_TEXTS = {
  locked: "in use", pinned: "pinned, not in use", cached: "cached, not in use", host: "in host memory only", ghost: "not computed; a waiting request needs it",
};

export function Tree({ snapshot }) {
  const { tree: { nodes, left_out: leftOut }, shared, host } = snapshot;
  const laid = useMemo(() => layoutTree(nodes), [nodes]);
  const box = useRef(null);
  const [width, setWidth] = useState(560);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(() => setWidth(Math.floor(box.current.clientWidth)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const drawn = laid.filter(node => node.tokens);
  const deepest = Math.max(0, ...drawn.map(node => node.start + node.tokens));
  const rows = laid.length ? laid[0].leaves : 0;
  const high = Math.max(7, Math.min(24, 260 / Math.max(1, rows)));
  const x = tokens => (tokens / deepest) * (width - 2) + 1;
  const name = node => node.prefix !== null && prefixName(node.prefix);
  const label = node => [name(node), node.running > 1 && `×${node.running}`, node.waiting > 0 && `${node.waiting} waiting`].filter(Boolean).join(" · ");
  const tip = node => [`${plural(node.tokens, "token")} (${whole(node.start)} to ${whole(node.start + node.tokens)}), ${NODE_TEXTS[node.state]}`,
    node.running > 0 && `used by ${plural(node.running, "running request")}`, node.waiting > 0 && `${plural(node.waiting, "request")} waiting at or below it`,
    name(node) && `end of shared prefix ${name(node)} of ${shared[node.prefix].ids.join(", ")}`].filter(Boolean).join("; ");
  return html`<section class="card wide" data-panel="tree"><${Title} name="Prefix tree" title="Prompts of cached, running and waiting requests. Left to right: tokens from the beginning of the prompt. Requests below a node share its tokens.">
      ${leftOut ? `the top ${drawn.length}` : drawn.length} prefixes, up to ${whole(deepest)} tokens deep<//>
    <div ref=${box} class="tree">${drawn.length
      ? html`<svg width=${width} height=${rows * high + 2} role="img" aria-label="prefix tree">
        ${drawn.map(node => {
          const wide = Math.max(2, x(node.start + node.tokens) - x(node.start) - 1.5), tall = node.leaves * high - 1.5;
          const text = label(node);
          return html`<g key=${node.index} data-prefix=${name(node) || null}><title>${tip(node)}</title>
            <rect x=${x(node.start)} y=${node.top * high + 1} width=${wide} height=${tall} rx="3" class=${"node " + node.state}
              style=${NODE_STYLES[node.state] || `fill:var(--node);fill-opacity:${Math.min(1, .5 + .12 * node.running)}`}></rect>
            ${text && wide > 12 + 6.4 * text.length && tall > 9 && html`<text x=${x(node.start) + 6} y=${node.top * high + 1 + tall / 2} dy=".36em" font-size=${Math.min(11, tall)}
              style=${`fill:${node.state === "locked" ? "#fff" : "var(--ink)"};font-weight:600`}>${text}</text>`}</g>`;
        })}</svg>`
      : html`<div class="empty">No cached prefixes yet.</div>`}</div>
    <${Legend} entries=${[["background:var(--node)", "in use (×: running requests)", "prefixes that running requests use; a letter marks the end of a shared prefix, and the rows under Running have the same letter"],
      drawn.some(node => node.state === "pinned") && ["background:var(--shared)", "pinned", "prefixes that are protected from eviction and not in use"],
      ["background:var(--cached)", "cached", "prefixes in the KV cache that no running request uses"],
      host && ["border:1.5px dotted var(--soft)", "in host memory", "prefixes that were evicted from the KV cache and can be fetched from host memory"],
      ["border:1px dashed var(--warm)", "wanted by a waiting request", "parts of waiting prompts that are not computed (ghost nodes)"]]} /></section>`;
}

// ------------------------------------------------------------------ requests

const Chip = ({ slot }) => html`<span class="chip" style=${`background:${ownerColour(slot)}`} title=${"slot " + slot}>${slot}</span>`;

/** Each token in one part: prompt = cached + fetched + computed + left. */
function runningTip(one) {
  const prompt = [`${whole(one.cached)} cached`, one.fetched > 0 && `${whole(one.fetched)} fetched from host memory`, `${whole(one.computed)} computed`, one.left > 0 && `${whole(one.left)} to compute`];
  return `${whole(one.prompt)} prompt tokens: ${prompt.filter(Boolean).join(" + ")}; ${whole(one.output)} of at most ${whole(one.max)} output tokens; ${plural(one.pages, "page")}`;
}

export function Running({ snapshot, lit = null }) {
  const { running, num_running: count, shared, host, tenants } = snapshot;
  const most = Math.max(1, ...running.map(one => one.prompt + one.max));
  const part = tokens => `width:${(100 * tokens) / most}%`;
  const others = one => shared[one.shared].ids.filter(id => id !== one.id);
  return html`<section class="card" data-panel="running"><${Title} name="Running" title="Requests with a slot: their prompt is computed, or they get a token per pass. In order of admission."><span data-figure="num_running">${whole(count)}</span><//>
    <div class="list aligned" tabindex="0" aria-label="running requests">${running.length ? running.map(one => html`
      <div class=${rowClass(lit, one.phase)} key=${one.id} data-id=${one.id} data-phase=${one.phase}><${Chip} slot=${one.slot} /><span class="id" title=${one.id}>${one.id}</span>
        <span class="tags"><${Tenant} name=${one.tenant} many=${tenants.length > 1} />
          ${one.shared !== null && html`<span class="tag prefix" data-prefix=${prefixName(one.shared)} title=${`shares its first ${whole(shared[one.shared].tokens)} tokens with ${others(one).join(", ")}`}>${prefixName(one.shared)} ${whole(shared[one.shared].tokens)}</span>`}</span>
        <span class="bar" title=${runningTip(one)}>
          <i class="b-cached" style=${part(one.cached)}></i>${one.fetched > 0 && html`<i class="b-host" style=${part(one.fetched)}></i>`}<i class="b-done" style=${part(one.computed)}></i><i style=${part(one.left)}></i><i class="b-out" style=${part(one.output)}></i></span>
        <span class="soft num" title=${one.left ? "prompt tokens that are cached or computed, of all prompt tokens" : "output tokens, of at most max_tokens"}>${one.left ? `prompt ${whole(one.prompt - one.left)}/${whole(one.prompt)}` : `${whole(one.output)}/${whole(one.max)}`}</span></div>`)
      : html`<div class="empty">No running requests.</div>`}
    ${count > running.length && html`<div class="empty">and ${whole(count - running.length)} more</div>`}</div>
    <${Legend} entries=${[[HATCH, "prompt cached", "prompt tokens found in the prefix cache"], host && [DOTS, "prompt fetched", "prompt tokens fetched from host memory"],
      ["background:var(--accent)", "prompt computed", "prompt tokens that were computed, or are computed by the pass in flight"], ["background:var(--good)", "output", "output tokens"]]} /></section>`;
}

const ORDERS = {
  admission: ["in order of admission", "The number is the place in the order in which the policy admits requests, as long as no other arrives."],
  arrival: ["in order of arrival", "The number is the order of arrival, after retracted requests. This policy selects anew for each admission, by the cache or by service."],
};

export function Queue({ snapshot, lit = null }) {
  const { waiting, num_waiting: count, order, tenants } = snapshot;
  const first = kind => waiting.find(one => one.reason === kind)?.place ?? Infinity;
  const reasons = [...snapshot.reasons].sort(([one], [other]) => first(one) - first(other));
  return html`<section class="card" data-panel="waiting"><${Title} name="Waiting" title=${`Requests that are not admitted, grouped by what they wait for. ${ORDERS[order][1]}`}><span data-figure="num_waiting">${whole(count)}</span>${count > 0 && ` · ${ORDERS[order][0]}`}<//>
    <div class="list" tabindex="0" aria-label="waiting requests">${reasons.map(([kind, number, clause]) => html`
      <details key=${kind} open data-reason=${kind}><summary title="hide or show the requests"><b class="num" data-figure="reason">${whole(number)}</b> ${number === 1 ? "waits" : "wait"} for ${number === 1 ? clause : clause.replace(/^its /, "their ")}</summary>
        ${waiting.filter(one => one.reason === kind).map(one => html`
          <div class=${rowClass(lit, "waiting")} key=${one.id} data-id=${one.id} data-phase="waiting" title=${one.why}><span class="soft num place" data-figure="place">${one.place}</span><span class="id">${one.id}</span>
            <span class="tags"><${Tenant} name=${one.tenant} many=${tenants.length > 1} />${one.retractions > 0 && html`<span class="tag" title=${`retracted ${one.retractions === 1 ? "once" : "twice"}`}>↩</span>`}</span>
            <span class="bar" title=${`${whole(one.tokens)} tokens: ${whole(one.cached)} cached${one.on_host ? ` + ${whole(one.on_host)} in host memory` : ""} + ${whole(one.tokens - one.cached - one.on_host)} to compute`}><i class="b-cached" style=${`width:${(100 * one.cached) / one.tokens}%`}></i><i class="b-host" style=${`width:${(100 * one.on_host) / one.tokens}%`}></i></span>
            <span class="soft num">${kind === "memory" && one.missing > 0 && `${plural(one.missing, "page")} short, `}${whole(one.tokens)} tokens, ${seconds(one.waited)}</span></div>`)}</details>`)}
      ${!count && html`<div class="empty">No waiting requests.</div>`}
    ${count > waiting.length && html`<div class="empty">and ${whole(count - waiting.length)} more</div>`}</div></section>`;
}

// ------------------------------------------------------------------ tenants

/** One row per tenant. Columns that a snapshot has no values for are left out. */
export function Tenants({ tenants }) {
  const most = Math.max(1e-9, ...tenants.map(one => one.service ?? 0));
  const has = name => tenants.some(one => one[name] != null);
  return html`<section class="card wide" data-panel="tenants"><${Title} name="Tenants" title="Requests and service by tenant. Service: prompt tokens computed plus output tokens times output_weight, divided by the tenant's weight. Policy fair keeps it equal.">${tenants.length}<//>
    <table class="plain"><thead><tr><th title="name of the tenant">tenant</th>
      ${has("service") && html`<th style="width:30%" title="weighted tokens so far: prompt tokens computed + output_weight × output tokens, divided by the weight">service</th>`}
      <th class="r" title="requests with a slot">running</th><th class="r" title="requests in the queue">waiting</th>
      ${has("finished") && html`<th class="r" title="requests that have finished so far">finished</th><th class="r" title="mean time from arrival to admission, of the requests admitted so far">mean wait</th>`}
      <th class="r" title="share of service relative to other tenants, under policy fair">weight</th></tr></thead>
    <tbody>${tenants.map(one => html`<tr key=${one.name} data-tenant=${one.name}><td>${one.name}</td>
      ${has("service") && html`<td><span class="bar" title=${`${whole(one.service ?? 0)} weighted tokens`}><i class="b-done" style=${`width:${(100 * (one.service ?? 0)) / most}%`}></i></span></td>`}
      <td class="r" data-figure="tenant_running">${whole(one.running)}</td><td class="r" data-figure="tenant_waiting">${whole(one.waiting)}</td>
      ${has("finished") && html`<td class="r" data-figure="tenant_finished">${whole(one.finished)}</td><td class="r" data-figure="tenant_wait">${seconds(one.wait)}</td>`}
      <td class="r">${one.weight}</td></tr>`)}</tbody></table>
    ${!tenants.length && html`<div class="empty">No requests yet.</div>`}</section>`;
}
