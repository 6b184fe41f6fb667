// Browsers start no worker from a file:// page, and the search runs in one: here a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), {hidden: true}));
      const inside = this.inside = frame.contentWindow, page = frame.contentDocument, outside = this;
      inside.postMessage = data => outside.dispatchEvent(new MessageEvent("message", {data}));
      inside.importScripts = (...addresses) => addresses.reduce((before, src) => before.then(() =>
        new Promise(done => page.body.appendChild(Object.assign(page.createElement("script"), {src, onload: done})))),
        Promise.resolve());
      this.ready = inside.importScripts(new URL(address, document.baseURI).href);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {}
  };
}
