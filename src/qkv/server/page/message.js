// One message of a conversation as an element: its text, its folded thinking, its figures and its buttons.

import { copyText, h } from "./dom.js";
import { number, t } from "./i18n.js";
import { LiveMarkdown } from "./live.js";

/** The user's words, shown as they were written. `actions.edit(text)` sends them again, changed. */
export function userMessage(message, actions) {
  const text = h("div", { class: "text written" }, message.content);
  const edit = button("edit", () => startEditing(article, message, actions));
  const article = frame("user", t("you"), text, h("footer", {}, edit));
  return article;
}

function frame(role, name, ...children) {
  return h("article", { class: `message ${role}` }, h("h2", {}, name), ...children);
}

function button(word, action, attributes = {}) {
  return h("button", { type: "button", onclick: action, ...attributes }, t(word));
}

function startEditing(article, message, actions) {
  const rows = Math.min(12, message.content.split("\n").length + 1);
  const area = h("textarea", { "aria-label": t("message"), rows });
  area.value = message.content;
  const cancel = () => {
    const again = userMessage(message, actions);
    article.replaceWith(again);
    again.querySelector("footer button").focus();
  };
  const escape = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation(); // an answer that is growing goes on
    cancel();
  };
  const submit = (event) => {
    event.preventDefault();
    if (area.value.trim()) actions.edit(area.value);
  };
  const form = h(
    "form",
    { class: "editing", onsubmit: submit, onkeydown: escape },
    area,
    h("p", { class: "quiet" }, t("edit_hint")),
    h("footer", {}, h("button", { class: "main" }, t("send_again")), button("cancel", cancel)),
  );
  article.replaceChildren(article.firstElementChild, form);
  area.focus();
}

/** An answer, which may still be growing. */
export class Answer {
  #message;
  #actions;
  #thoughts = h("div", { class: "written" });
  #summary = h("summary");
  #thinking = h("details", { class: "thinking", hidden: true }, this.#summary, this.#thoughts);
  #text = h("div", { class: "text" });
  #markdown = new LiveMarkdown(this.#text);
  #footer = h("footer");
  element;

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.element = frame("assistant", t("model"), this.#thinking, this.#text, this.#footer);
    this.addThought(message.reasoning);
    this.addText(message.content);
    this.#markdown.flush();
    this.update();
  }

  addThought(text) {
    if (!text) return;
    this.#thinking.hidden = false;
    this.#thoughts.append(text);
  }

  addText(text) {
    if (text) this.#markdown.push(text);
  }

  /** Shows everything around the text as the message's state has it. */
  update() {
    const { state, content, reasoning, seconds } = this.#message;
    const running = state === "running";
    if (!running) this.#markdown.flush();
    const word = seconds == null ? (running ? "thinking" : "thought_unknown") : "thought";
    this.#summary.textContent = t(word, { seconds: number(seconds ?? 0, { maximumFractionDigits: 1 }) });
    this.element.ariaBusy = String(running);
    this.element.classList.toggle("waiting", running && !content && !reasoning);
    this.#footer.replaceChildren(...(running ? [] : this.#finished()));
    if (running && !content && !reasoning) this.#footer.append(h("span", { class: "quiet" }, t("reading")));
  }

  #finished() {
    const { state, content, error, finish } = this.#message;
    const parts = [];
    if (error) parts.push(h("p", { class: "error", role: "alert" }, describeError(error)));
    if (state === "stopped") parts.push(h("span", { class: "quiet" }, t("stopped")));
    if (finish === "length") parts.push(h("span", { class: "quiet" }, t("cut_at_limit")));
    if (this.#message.usage) parts.push(figures(this.#message));
    if (content) parts.push(button("copy", () => copyText(content).then(this.#actions.copied), { class: "copy" }));
    parts.push(button("regenerate", this.#actions.regenerate, { class: "regenerate" }));
    return parts;
  }
}

/** The error as a sentence: ours in the page's language, then the server's own words. */
export function describeError({ kind, detail, status, retryAfter }) {
  const word = kind === "error_busy" && /^\d+$/.test(retryAfter) ? "error_busy_until" : kind;
  return [t(word, { status, seconds: retryAfter }), detail].filter(Boolean).join(" ");
}

/** How fast the answer came, and how much of the prompt was cached. */
function figures({ usage, speed }) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const share = usage.prompt_tokens ? cached / usage.prompt_tokens : 0;
  const bar = h("span", { class: "bar", "aria-hidden": "true" }, h("span"));
  bar.firstChild.style.width = `${100 * share}%`;
  const percent = number(share, { style: "percent" });
  const words = [
    speed && t("speed", { speed: number(speed, { maximumSignificantDigits: 3 }) }),
    t("tokens", { count: number(usage.completion_tokens) }),
    t("cached", { count: number(usage.prompt_tokens), share: percent }),
  ];
  return h("span", { class: "figures quiet" }, words.filter(Boolean).join(" · "), " ", bar);
}
