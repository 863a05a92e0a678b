"use strict";
// Zoom and pan of the pipeline's picture: by its buttons, Ctrl and wheel, double click, drag, two fingers, and keys.
for (const picture of document.querySelectorAll(".picture")) {
  const drawings = [...picture.querySelectorAll("svg")];
  const wholes = new Map(drawings.map((svg) => [svg, svg.getAttribute("viewBox").split(" ").map(Number)]));
  const views = new Map([...wholes].map(([svg, whole]) => [svg, [...whole]]));
  const pointers = new Map();
  const MOST_ZOOM = 12;

  const shown = () => drawings.find((svg) => svg.getBoundingClientRect().width > 0);
  const clamp = (number, least, most) => Math.min(Math.max(number, least), most);

  // Set the visible part of a drawing, inside of the whole.
  function show(svg, left, top, zoom) {
    const [, , wholeWidth, wholeHeight] = wholes.get(svg);
    const [width, height] = [wholeWidth / zoom, wholeHeight / zoom];
    const view = [clamp(left, 0, wholeWidth - width), clamp(top, 0, wholeHeight - height), width, height];
    views.set(svg, view);
    svg.setAttribute("viewBox", view.join(" "));
    svg.classList.toggle("zoomed", zoom > 1);
  }

  const zoomOf = (svg) => wholes.get(svg)[2] / views.get(svg)[2];
  const showWhole = () => drawings.forEach((svg) => show(svg, 0, 0, 1));

  // The position of a point of the screen, in a drawing.
  function position(svg, x, y) {
    const point = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM().inverse());
    return [point.x, point.y];
  }

  // Zoom around a point of the screen, which stays in its place.
  function zoomBy(svg, factor, x, y) {
    const [left, top] = views.get(svg);
    const zoom = clamp(zoomOf(svg) * factor, 1, MOST_ZOOM);
    const shrink = zoomOf(svg) / zoom;
    const [fixedX, fixedY] = position(svg, x, y);
    show(svg, fixedX - (fixedX - left) * shrink, fixedY - (fixedY - top) * shrink, zoom);
  }

  function zoomCenter(factor) {
    const svg = shown();
    const box = svg.getBoundingClientRect();
    zoomBy(svg, factor, box.left + box.width / 2, box.top + box.height / 2);
  }

  function moveBy(svg, x, y) {
    const [left, top] = views.get(svg);
    show(svg, left + x, top + y, zoomOf(svg));
  }

  function drag(event) {
    const svg = event.currentTarget;
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    const [x, y] = [event.clientX, event.clientY];
    if (other) {
      const distance = ([otherX, otherY], pointX, pointY) => Math.hypot(otherX - pointX, otherY - pointY) || 1;
      const factor = distance(other, x, y) / distance(other, ...before);
      zoomBy(svg, factor, (other[0] + x) / 2, (other[1] + y) / 2);
    }
    const [[startX, startY], [endX, endY]] = [position(svg, ...before), position(svg, x, y)];
    const share = other ? 2 : 1;
    moveBy(svg, (startX - endX) / share, (startY - endY) / share);
    pointers.set(event.pointerId, [x, y]);
  }

  const BUTTONS = {
    in: () => zoomCenter(1.5),
    out: () => zoomCenter(1 / 1.5),
    whole: showWhole,
    full: () => (document.fullscreenElement ? document.exitFullscreen() : picture.requestFullscreen()),
  };
  const KEYS = { "+": [1.5], "=": [1.5], "-": [1 / 1.5], ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const svg = shown();
    const [first, second] = KEYS[event.key] ?? [];
    if (event.key === "0") showWhole();
    else if (first === undefined) return;
    else if (second === undefined) zoomCenter(first);
    else if (zoomOf(svg) > 1) moveBy(svg, (first * views.get(svg)[2]) / 8, (second * views.get(svg)[3]) / 8);
    else return;
    event.preventDefault();
  }

  for (const svg of drawings) {
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomBy(svg, Math.exp(-event.deltaY / 300), event.clientX, event.clientY);
    }, { passive: false });
    svg.addEventListener("dblclick", (event) => zoomBy(svg, 2, event.clientX, event.clientY));
    svg.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
      if (zoomOf(svg) > 1) svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", drag);
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
      svg.addEventListener(end, (event) => pointers.delete(event.pointerId));
    }
  }
  for (const button of picture.querySelectorAll("button")) {
    button.addEventListener("click", BUTTONS[button.dataset.zoom]);
  }
  picture.tabIndex = 0;
  picture.addEventListener("keydown", press);
  window.addEventListener("beforeprint", showWhole);
  picture.querySelector(".zoom").hidden = false;
}
