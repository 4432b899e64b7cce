"use strict";
// Shared by all pages: the content, texts for numbers, and elements.

const content = JSON.parse(document.getElementById("content").textContent);

function byId(id) { return document.getElementById(id); }

// An element with attributes (``on…`` are listeners) and children, which are elements or texts.
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "line", "path", "circle", "text", "title", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name.replace(" ", "-")).trim();
}

function digits(value) { return value < 10 ? 2 : value < 100 ? 1 : 0; }

function bytes(count) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (count >= size) return (count / size).toFixed(digits(count / size)) + " " + unit;
  }
  return count + " B";
}

function seconds(value) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (value >= size) return (value / size).toFixed(digits(value / size)) + " " + unit;
  }
  return "0 s";
}

function micro(value) { return seconds(value / 1e6); }

function share(part, whole) {
  const percent = whole > 0 ? 100 * part / whole : 0;
  return percent.toFixed(percent < 10 || (percent > 99 && percent < 100) ? 1 : 0) + " %";
}
