"use strict";
// Elements of the page, made of plain values: texts are set as texts, so a name with markup in it is shown as it is.

/** An element with attributes and children; a key that begins with `on` is a listener, and null children are left out. */
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of a picture. */
function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined));
  return made;
}

/** A button that looks like a link, for what is in this page. */
function link(text, action, title = "") {
  return element("button", { type: "button", class: "link", title: title || null, onclick: action }, text);
}

/** Tells an action of the page's width and colours when they change. */
function whenShownOtherwise(node, action) {
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(node.clientWidth - width) < 1) return;
    width = node.clientWidth;
    action();
  }).observe(node);
  whenRecoloured(node, action);
}

/** Tells an action when the page's colours change, as long as the node is in the page. */
function whenRecoloured(node, action) {
  const recoloured = () => {
    if (node.isConnected) action();
    else document.removeEventListener("colours", recoloured);
  };
  document.addEventListener("colours", recoloured);
}

/** The value of a colour of the style sheet, for canvases. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A colour for each class of ranks, of each microbatch, ...: neighbours differ. */
function hue(number) {
  const dark = document.documentElement.dataset.theme === "dark";
  const lightness = (dark ? 58 : 52) - 8 * (Math.floor(number / 8) % 2);
  return `hsl(${[212, 28, 145, 340, 265, 50, 185, 95][number % 8]} ${dark ? 52 : 58}% ${lightness}%)`;
}
