// Pictures that are to be sent: picked, pasted or dropped, made smaller if need be, as data URLs.
import { button, element } from "./dom.js";

const LARGEST_SIDE = 2048;
const LARGEST_BYTES = 2 << 20;

async function dataUrl(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, LARGEST_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= LARGEST_BYTES && /^image\/(png|jpeg|webp|gif)$/.test(file.type)) {
    picture.close();
    return await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const canvas = element("canvas", { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

export class Pictures {
  /** list: a <ul> to show them in. notice(text): tells what could not be read. */
  constructor(list, notice) {
    Object.assign(this, { list, notice, urls: [] });
  }

  async add(files) {
    for (const file of files) {
      try {
        this.urls.push(await dataUrl(file));
      } catch {
        this.notice(`${file.name || "This file"} is no picture that this browser can read.`);
      }
    }
    this.draw();
  }

  /** All of them, to be sent; none is left. */
  take() {
    const taken = this.urls;
    this.urls = [];
    this.draw();
    return taken;
  }

  draw() {
    this.list.hidden = !this.urls.length;
    this.list.replaceChildren(
      ...this.urls.map((src, i) => {
        const remove = button("×", () => {
          this.urls.splice(i, 1);
          this.draw();
        }, { "aria-label": `Remove picture ${i + 1}` });
        return element("li", {}, element("img", { src, alt: `Picture ${i + 1}` }), remove);
      }),
    );
  }
}
