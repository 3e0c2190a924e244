// Line charts over time. uPlot draws 900 points in under a millisecond, so each update sets all data again.
import uPlot from "../vendor/uPlot.js";
import { html, useEffect, useRef } from "./html.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function hour(at, ticks) {
  if (ticks.length > 1 && ticks[1] - ticks[0] >= 43_200) return new Date(at * 1000).toLocaleDateString([], { month: "short", day: "numeric" });
  const fine = ticks.length > 1 && ticks[1] - ticks[0] < 60;
  return new Date(at * 1000).toLocaleTimeString([], {
    hour12: false,
    hour: "2-digit",
    minute: "2-digit",
    second: fine ? "2-digit" : undefined,
  });
}

// An axis as wide as its longest label.
const widest = (plot, labels) => Math.max(40, 14 + 7 * Math.max(0, ...(labels || []).map((label) => String(label).length)));

// Few points far apart are shown as points, because they make no line.
const isSparse = (plot, series) => plot.data[series].filter((value) => value != null).length < 30;

// The legend shows the newest values while the pointer is not on the chart.
const newest = (plot) => {
  if (plot && plot.cursor.idx == null) plot.setLegend({ idx: plot.data[0].length - 1 });
};

// `lines`: [{ label, tone, values, fill, stepped }], `unit`: formats a value.
export function Chart({ at, lines, unit = (v) => v, height = 170, label, floor = 0 }) {
  const box = useRef(null),
    plot = useRef(null);
  const data = [at, ...lines.map((line) => line.values)];

  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const axis = {
        stroke: color("muted"),
        grid: { stroke: color("line"), width: 1 },
        ticks: { show: false },
        font: "11px system-ui",
      };
      plot.current = new uPlot(
        {
          width: box.current.clientWidth || 300,
          height,
          padding: [8, 30, 0, 0], // room for half of the last time label
          cursor: { y: false, points: { size: 6 } },
          legend: { live: true },
          hooks: { ready: [newest] },
          scales: { y: { range: (_, low, high) => [Math.min(floor, low ?? 0), (high ?? 0) <= floor ? floor + 1 : high * 1.1] } },
          axes: [
            { ...axis, space: 80, size: 26, values: (_, ticks) => ticks.map((t) => hour(t, ticks)) },
            { ...axis, size: widest, values: (_, ticks) => ticks.map((t) => unit(t)) },
          ],
          series: [
            { value: (_, t) => (t ? new Date(t * 1000).toLocaleTimeString([], { hour12: false }) : "–") },
            ...lines.map((line) => ({
              label: line.label,
              stroke: color(line.tone),
              width: 2,
              fill: line.fill ? `${color(line.tone)}33` : undefined,
              spanGaps: false,
              points: { show: isSparse, size: 5, fill: color(line.tone) },
              paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
              value: (_, v) => (v == null ? "–" : unit(v)),
            })),
          ],
        },
        data,
        box.current,
      );
    };
    make();
    const sized = new ResizeObserver(() => plot.current?.setSize({ width: box.current.clientWidth, height }));
    sized.observe(box.current);
    const themed = new MutationObserver(make);
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => {
      sized.disconnect();
      themed.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [lines.map((line) => line.label).join()]);

  useEffect(() => {
    plot.current?.setData(data);
    newest(plot.current);
  }, [at]);
  return html`<div class="chart" ref=${box} role="img" aria-label=${label}></div>`;
}
