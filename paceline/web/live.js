// The live page: the current state of the engine. Polls once a second, only while the page is visible.
import { Chart, html, Pages, percent, Queue, render, Running, seconds, Stat, ThemeButton, Tree, useEffect, useMemo, useState, whole } from "./parts.js";

const INTERVAL_MS = 1000;

function useLive() {
  const [state, setState] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    let timer, ended = false;
    const poll = async () => {
      if (document.visibilityState === "visible") {
        try {
          const key = sessionStorage.getItem("key");
          const response = await fetch("/live/state", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
          if (!response.ok) throw Object.assign(new Error((await response.json()).error.message), { status: response.status });
          const found = await response.json();
          if (!ended) { setState(found); setProblem(null); }
        } catch (error) {
          if (!ended) setProblem(error);
        }
      }
      if (!ended) timer = setTimeout(poll, INTERVAL_MS);
    };
    poll();
    document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") { clearTimeout(timer); poll(); } });
    return () => { ended = true; clearTimeout(timer); };
  }, []);
  return [state, problem];
}

/** Turns cumulative counters into rates. Columns as in server/live_page.py. */
function useSeries(samples, now) {
  return useMemo(() => {
    const times = [], decoded = [], computed = [], hits = [], running = [], waiting = [], p50 = [], p99 = [];
    for (let i = 1; i < samples.length; i++) {
      const [before, after] = [samples[i - 1], samples[i]];
      const span = after[0] - before[0];
      if (span <= 0) continue;
      times.push(after[0] - now);
      decoded.push((after[1] - before[1]) / span);
      computed.push((after[2] - before[2]) / span);
      const prompts = after[3] - before[3];
      hits.push(prompts ? (after[4] - before[4]) / prompts : null);
      running.push(after[5]); waiting.push(after[6]);
      p50.push(after[7]); p99.push(after[8]);
    }
    return { times, decoded, computed, hits, running, waiting, p50, p99 };
  }, [samples]);
}

function Tenants({ tenants }) {
  const most = Math.max(1e-9, ...tenants.map(one => (one.service ?? 0)));
  return html`<section class="card"><h2><b>Tenants</b> weighted service so far</h2>
    <table class="plain"><thead><tr><th>tenant</th><th style="width:40%">weighted tokens</th><th class="r">running</th><th class="r">waiting</th><th class="r">weight</th></tr></thead>
    <tbody>${tenants.map(one => html`<tr key=${one.name}><td>${one.name}</td>
      <td><span class="bar" title=${one.service == null ? "" : whole(one.service)}><i class="b-done" style=${`width:${(100 * (one.service ?? 0)) / most}%`}></i></span></td>
      <td class="r">${whole(one.running)}</td><td class="r">${whole(one.waiting)}</td><td class="r">${one.weight}</td></tr>`)}</tbody></table>
    ${!tenants.length && html`<div class="empty">No requests yet.</div>`}</section>`;
}

function Recent({ recent }) {
  return html`<section class="card w12"><h2><b>Recent requests</b> newest first</h2>
    <div style="overflow-x:auto"><table class="plain"><thead><tr><th>request</th><th>tenant</th><th class="r">finished</th><th class="r">prompt</th><th class="r">cached</th><th class="r">output</th>
      <th class="r">waited</th><th class="r">TTFT</th><th class="r">TPOT</th><th style="padding-left:20px">finish reason</th></tr></thead>
    <tbody>${recent.map(one => html`<tr key=${one.id + one.at}><td title=${one.id}>${one.id.length > 28 ? one.id.slice(0, 12) + "…" + one.id.slice(-10) : one.id}</td><td>${one.tenant}</td><td class="r">${seconds(one.ago)} ago</td>
      <td class="r">${whole(one.prompt)}</td><td class="r">${whole(one.cached)}</td><td class="r">${whole(one.output)}</td>
      <td class="r">${seconds(one.wait)}</td><td class="r">${seconds(one.ttft)}</td><td class="r">${seconds(one.tpot)}</td>
      <td style="padding-left:20px" class=${one.reason === "stop" || one.reason === "length" ? "" : "warm"}>${one.reason}${one.retractions ? ` ↩${one.retractions}` : ""}</td></tr>`)}</tbody></table></div>
    ${!recent.length && html`<div class="empty">No request has finished yet.</div>`}</section>`;
}

function Page() {
  const [state, problem] = useLive();
  return state ? html`<${Board} state=${state} problem=${problem} />`
    : problem?.status === 401 ? html`<${KeyForm} />`
    : html`<main class="live"><div class="empty w12">${problem ? `The server does not respond: ${problem.message}` : "Loading…"}</div></main>`;
}

/** A server with API keys shows the requests of all tenants to its admin only. The key is kept in this tab. */
function KeyForm() {
  const keep = event => { event.preventDefault(); sessionStorage.setItem("key", event.target.elements.key.value); location.reload(); };
  return html`<main class="live"><form class="card w4" onSubmit=${keep}><h2><b>Admin key</b></h2>
    <p class="soft">This server uses API keys; this page needs the admin key.</p>
    <input name="key" type="password" aria-label="admin key" autofocus style="width:70%" /> <button class="btn main">Open</button></form></main>`;
}

function Board({ state, problem }) {
  const { snapshot, latency } = state;
  const series = useSeries(state.samples, state.now);
  const last = name => series[name].at(-1) ?? 0;
  const { memory, counters } = snapshot;
  const ended = Object.values(counters.finished).reduce((sum, count) => sum + count, 0);
  const ago = values => values.map(value => (value ? `−${seconds(-value)}` : "now"));
  return html`
    <header class="top"><img class="mark" src="/live/mark.svg" alt="" /><h1>Paceline</h1>
      <span class="sub">${[state.model, state.device].filter(Boolean).join(" · ")} · policy ${state.policy} · up ${seconds(state.uptime)}</span>
      <span class="end"><span class="soft" role="status"><i class=${"dot" + (problem ? " off" : "")}></i> ${problem ? `no response: ${problem.message}` : "live"}</span><${ThemeButton} /></span></header>
    <main class="live">
      <section class="card w12"><div class="stats">
        <${Stat} id="tokens_per_s" name="output tokens/s" value=${whole(last("decoded"))} />
        <${Stat} id="prompt_tokens_per_s" name="prefill tokens/s" value=${whole(last("computed"))} />
        <${Stat} id="ttft_p50" name="TTFT p50" value=${seconds(latency.ttft[0])} title="over the last 200 requests" />
        <${Stat} id="ttft_p99" name="TTFT p99" value=${seconds(latency.ttft[1])} title="over the last 200 requests" />
        <${Stat} id="tpot_p50" name="TPOT p50" value=${seconds(latency.tpot[0])} title="over the last 200 requests" />
        <${Stat} id="hit_rate" name="prefix cache hit rate" value=${percent(counters.prompt_tokens ? counters.hit_tokens / counters.prompt_tokens : 0)} />
        <${Stat} id="kv" name="KV cache usage" value=${percent(1 - (memory.free + memory.cached) / memory.pages)} />
        <${Stat} id="ended" name="finished requests" value=${whole(ended)} />
        <${Stat} id="retractions" name="retractions" value=${whole(counters.retractions)} />
      </div></section>
      <section class="card w4"><${Chart} title="Tokens per second" times=${series.times} xFormat=${ago} series=${[{ name: "output", values: series.decoded, colour: "--good" }, { name: "prefill", values: series.computed, colour: "--accent", dash: [5, 4] }]} /></section>
      <section class="card w4"><${Chart} title="TTFT" times=${series.times} xFormat=${ago} format=${seconds} series=${[{ name: "p50", values: series.p50, colour: "--accent" }, { name: "p99", values: series.p99, colour: "--warm", dash: [5, 4] }]} /></section>
      <section class="card w4"><${Chart} title="Requests" times=${series.times} xFormat=${ago} series=${[{ name: "running", values: series.running, colour: "--accent" }, { name: "waiting", values: series.waiting, colour: "--warm", dash: [5, 4] }]} /></section>
      <div class="w6"><${Queue} snapshot=${snapshot} /></div><div class="w6"><${Running} snapshot=${snapshot} /></div>
      <div class="w6 stack"><${Pages} snapshot=${snapshot} hint=${`of ${state.page_size} tokens`} /><${Tenants} tenants=${snapshot.tenants} /></div>
      <div class="w6"><${Tree} snapshot=${snapshot} /></div>
      <${Recent} recent=${state.recent} />
      <section class="card w6"><h2><b>Since the start</b></h2><table class="plain"><tbody>
        ${[["requests", counters.added], ["refused", counters.refused], ["forward passes", counters.steps], ["prompt tokens admitted", counters.prompt_tokens], ["prompt tokens cached", counters.hit_tokens], ["prompt tokens computed", counters.computed_tokens], ["output tokens", counters.decoded_tokens], ["pages evicted", counters.evicted_pages]]
          .map(([name, value]) => html`<tr><td>${name}</td><td class="r">${whole(value)}</td></tr>`)}</tbody></table></section></main>`;
}

render(html`<${Page} />`, document.body);
