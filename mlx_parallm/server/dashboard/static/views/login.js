// The key is traded for a session cookie, and kept nowhere.
import { login } from "../api.js";
import { html, useRef, useState } from "../lib.js";
import { Field } from "../parts.js";

export function Login({ refusal, onSignedIn }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const input = useRef(null);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      await login(key);
      setKey("");
      await onSignedIn();
    } catch (failed) {
      setError(failed.message);
      input.current?.focus();
    }
    setBusy(false);
  };
  const why = refusal.status === 403 ? "That key is not an admin's." : "This server asks for a key.";
  return html`<main class="login">
    <h1>MLX ParaLLM</h1>
    <form onSubmit=${submit}>
      <p>${why} The dashboard needs the admin key: the one that <code>--admin-key</code> or the keys file gives that role.</p>
      <${Field} label="Admin key">
        <input
          type="password"
          name="key"
          autocomplete="current-password"
          required
          ref=${input}
          value=${key}
          onInput=${(event) => setKey(event.target.value)}
        />
      <//>
      <button type="submit" class="primary" disabled=${busy}>Sign in</button>
      <p class="notice bad" role="alert">${error}</p>
    </form>
  </main>`;
}
