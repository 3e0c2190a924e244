// The one way markup is made: strings become text nodes, whatever is in them.
import { h } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(h);
export { render, Fragment } from "../vendor/preact.js";
export { useEffect, useRef, useState } from "../vendor/hooks.js";
export { signal, computed, effect, untracked } from "../vendor/signals.js";
