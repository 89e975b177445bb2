// The page: login, navigation, colours, and the one event stream that all views read.
import { get, isSignedIn, logout, onRefused, watch } from "./api.js";
import { html, render, useEffect, useRef, useState, useTheme } from "./lib.js";
import { Live } from "./views/live.js";
import { Login } from "./views/login.js";
import { Models } from "./views/models.js";
import { Playground } from "./views/playground.js";
import { Requests } from "./views/requests.js";
import { Rollouts } from "./views/rollouts.js";
import { Training } from "./views/training.js";

const KEPT_POINTS = 300;
const VIEWS = {
  live: ["Live", Live],
  models: ["Models", Models],
  training: ["Training", Training],
  rollouts: ["Rollouts", Rollouts],
  playground: ["Playground", Playground],
  requests: ["Requests", Requests],
};
const CONNECTION = { open: "connected", lost: "reconnecting …", closed: "not connected", "": "connecting …" };

const viewOf = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "live");

function useView() {
  const [view, setView] = useState(viewOf);
  useEffect(() => {
    const change = () => setView(viewOf());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return view;
}

/** The newest snapshot, and the points of those before it. */
function useFeed(signedIn) {
  const [state, setState] = useState("");
  const [live, setLive] = useState({ snapshot: null, points: [] });
  useEffect(() => {
    if (!signedIn) return undefined;
    let close = () => {};
    let timer = null;
    const open = () => {
      close = watch({
        onState: (now) => {
          setState(now);
          if (now !== "closed") return;
          get("dashboard/snapshot").catch(() => {}); // says whether it was for want of a key
          timer = setTimeout(open, 3000);
        },
        onHistory: (points) => setLive((before) => ({ ...before, points })),
        onSnapshot: (snapshot) => setLive(({ points }) => ({ snapshot, points: added(points, snapshot) })),
      });
    };
    open();
    return () => {
      close();
      clearTimeout(timer);
    };
  }, [signedIn]);
  return { ...live, state };
}

function added(points, snapshot) {
  const last = points.at(-1);
  if (last && last.time >= snapshot.time) return points;
  const named = (prefix, values) => Object.fromEntries(Object.entries(values).map(([k, v]) => [`${prefix}_${k}`, v]));
  const point = {
    time: snapshot.time,
    queue: snapshot.queue,
    running: snapshot.running,
    ...snapshot.rates,
    ...named("first", snapshot.first_token),
    ...named("step", snapshot.step),
  };
  return [...points, point].slice(-KEPT_POINTS);
}

function ThemeSwitch() {
  const other = useTheme() === "dark" ? "light" : "dark";
  const choose = () => dispatchEvent(new CustomEvent("themechosen", { detail: other }));
  return html`<button type="button" class="quiet" onClick=${choose}>${other === "dark" ? "Dark" : "Light"} colours</button>`;
}

function App() {
  const [refusal, setRefusal] = useState(null);
  const [signedIn, setSignedIn] = useState(false);
  const view = useView();
  const feed = useFeed(signedIn);
  const heading = useRef(null);
  useEffect(() => onRefused((error) => {
    setRefusal(error);
    setSignedIn(false);
  }), []);
  const begin = () =>
    get("dashboard/snapshot").then(
      () => {
        setRefusal(null);
        setSignedIn(true);
      },
      (error) => {
        if (error.status !== 401 && error.status !== 403) setTimeout(begin, 3000); // it may be starting
      },
    );
  useEffect(() => void begin(), []);
  useEffect(() => {
    document.title = `${VIEWS[view][0]} · MLX ParaLLM`;
    if (document.activeElement !== document.body) heading.current?.focus({ preventScroll: true });
  }, [view]);
  if (refusal && !signedIn) return html`<${Login} refusal=${refusal} onSignedIn=${begin} />`;
  const [title, View] = VIEWS[view];
  const { snapshot } = feed;
  const open = feed.state === "open";
  const state = open && snapshot?.draining ? "shutting down" : open && snapshot?.paused ? "paused" : CONNECTION[feed.state];
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); heading.current?.focus(); }}>
      Skip to the content
    </a>
    <header>
      <p class="brand"><img src="dashboard/static/icon.svg" alt="" width="22" height="22" /> MLX ParaLLM</p>
      <p class="state" role="status"><span class="dot ${open && !snapshot?.paused ? "good" : "bad"}"></span>${state}</p>
      <${ThemeSwitch} />
      ${isSignedIn() && html`<button type="button" class="quiet" onClick=${() => logout().catch(() => {})}>Sign out</button>`}
    </header>
    <nav aria-label="Views">
      ${Object.entries(VIEWS).map(
        ([name, [label]]) =>
          html`<a href="#${name}" key=${name} aria-current=${name === view ? "page" : undefined}>${label}</a>`,
      )}
    </nav>
    <main id="content">
      <h1 tabindex="-1" ref=${heading}>${title}</h1>
      <${View} snapshot=${snapshot} points=${feed.points} />
    </main>
  `;
}

render(html`<${App} />`, document.getElementById("app"));
