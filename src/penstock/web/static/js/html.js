// The one way markup is made: strings become text nodes, whatever is in them.
import { h } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(h);
export { render, Fragment } from "../vendor/preact.js";
export { useEffect, useMemo, useRef, useState, useCallback } from "../vendor/hooks.js";
export { signal, computed, effect, batch, useSignal, useComputed } from "../vendor/signals.js";
