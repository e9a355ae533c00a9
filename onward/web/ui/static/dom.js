// Builds elements. Text is always set as text: nothing here, or in any other module, parses HTML.

export function el(tag, fields = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "for") element.htmlFor = value;
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

// Sets text only where it differs, so that a selection or a screen reader is not disturbed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 1) return Math.round(value * 1000) + " ms";
  if (value < 90) return value.toFixed(1) + " s";
  return Math.round(value / 60) + " min";
}
