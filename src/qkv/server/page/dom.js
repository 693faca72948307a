// Small helpers around the DOM. A string only ever becomes a text node: nothing here can turn text into HTML.

/** An element with attributes (`on…` names are event handlers) and children, each a node or a string. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Tells screen readers one short thing, politely. */
export function announce(text) {
  $("status").textContent = text;
}

/** Puts text on the clipboard; the modern way exists only over HTTPS and on localhost. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** Offers a file for download. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const isNarrow = () => matchMedia("(max-width: 50rem)").matches;

/** Opens or closes a panel at the side, and tells its button. A narrow page has room for one. */
export function showPanel(name, open) {
  const others = isNarrow() && open ? ["conversations", "settings"] : [];
  for (const one of [...others, name]) {
    $(`${one}-panel`).hidden = one !== name || !open;
    $(`${one}-button`).ariaExpanded = String(one === name && open);
  }
}

/** Choices that outlive the page. A browser that forbids storage forgets them with it. */
export const preferences = {
  get(name) {
    try {
      return localStorage.getItem(`qkv-${name}`);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`qkv-${name}`, value);
    } catch {
      // Forbidden or full: the choice holds until the page is closed.
    }
  },
};

/** Asks for a line of text, or for a yes where no `field` (properties of the input) is given. No gives null. */
export function ask(text, yes, field) {
  const dialog = $("question");
  const input = dialog.querySelector("input");
  Object.assign(input, { value: "", type: "text", pattern: ".*", hidden: !field, disabled: !field }, field);
  $("question-text").textContent = text;
  $("question-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const answer = () => resolve(dialog.returnValue === "yes" ? input.value.trim() : null);
    dialog.addEventListener("close", answer, { once: true });
  });
}
