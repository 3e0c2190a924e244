// The only way in which markup is made: strings always become text nodes.
import { h } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(h);
export { render, Fragment } from "../vendor/preact.js";
export { useEffect, useRef, useState } from "../vendor/hooks.js";
export { signal, computed, effect, untracked } from "../vendor/signals.js";
