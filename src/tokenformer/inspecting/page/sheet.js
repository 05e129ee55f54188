// The sheet: what Python wrote about one text or image, with its arrays unpacked. Enters: the JSON of sheet.py. Leaves:
// a `Sheet`, which knows for every position which tokens did something there, and for every token where it did.

const ARRAYS = { Uint8: Uint8Array, Int8: Int8Array, Uint16: Uint16Array, Uint32: Uint32Array, Float32: Float32Array };

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.bytes), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const found = {};
  for (const [name, [type, at, size]] of Object.entries(packed.table)) found[name] = new ARRAYS[type](buffer, at, size);
  return found;
}

// Where each of several runs of the given lengths begins, and where the last one ends.
function startsOf(counts) {
  const starts = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) starts[i + 1] = starts[i] + counts[i];
  return starts;
}

class Sheet {
  static async read(facts) {
    return new Sheet(facts, await unpack(facts.arrays));
  }

  constructor(facts, arrays) {
    Object.assign(this, { facts, arrays });
    this.positions = facts.pieces.length;
    this.layers = facts.layers;
    this.seen = facts.layers.flatMap((layer, i) => (layer.seen ? [i] : []));
    this.seenNumber = new Map(this.seen.map((layer, i) => [layer, i]));
    this.rows = arrays.token_ids.length;
    this.firstRow = startsOf(arrays.token_counts);
    this.layerOf = new Uint16Array(this.rows);
    for (let i = 0; i < this.layers.length; i++) this.layerOf.fill(i, this.firstRow[i], this.firstRow[i + 1]);
    this.entryStarts = startsOf(arrays.entry_counts);
    this.sortByPosition();
  }

  // Entries come token by token; this puts them in the order of positions, beside it.
  sortByPosition() {
    const { entry_positions: positions } = this.arrays, counts = new Uint32Array(this.positions);
    for (const position of positions) counts[position]++;
    this.positionStarts = startsOf(counts);
    const next = this.positionStarts.slice();
    this.entriesByPosition = new Uint32Array(positions.length);
    this.rowOfEntry = new Uint32Array(positions.length);
    for (let row = 0; row < this.rows; row++) {
      for (let entry = this.entryStarts[row]; entry < this.entryStarts[row + 1]; entry++) {
        this.rowOfEntry[entry] = row;
        this.entriesByPosition[next[positions[entry]]++] = entry;
      }
    }
  }

  // The row of a token on this page; -1 if it is not part of it.
  find(layer, token) {
    const ids = this.arrays.token_ids;
    for (let low = this.firstRow[layer], high = this.firstRow[layer + 1]; low < high; ) {
      const middle = (low + high) >> 1;
      if (ids[middle] === token) return middle;
      if (ids[middle] < token) low = middle + 1;
      else high = middle;
    }
    return -1;
  }

  token(row) {
    return this.arrays.token_ids[row];
  }

  age(row) {
    return this.arrays.ages[row];
  }

  isNew(row) {
    return this.age(row) > this.facts.new_after;
  }

  writes(row) {
    return this.layers[this.layerOf[row]].writes;
  }

  entry(number) {
    const { arrays } = this, row = this.rowOfEntry[number], root = arrays.entry_effects[number] / 127;
    const weight = (arrays.entry_weights[number] / 127) * arrays.largest[row];
    const scale = arrays.effect_scales[this.seenNumber.get(this.layerOf[row])];
    const adds = Math.abs(weight) * arrays.lengths[row], effect = Math.sign(root) * root * root * scale;
    return { row, position: arrays.entry_positions[number], weight, adds, effect };
  }

  // What was done at a position, by layer, the strongest first.
  at(position) {
    const found = new Map(this.seen.map((layer) => [layer, []]));
    for (let i = this.positionStarts[position]; i < this.positionStarts[position + 1]; i++) {
      const entry = this.entry(this.entriesByPosition[i]);
      found.get(this.layerOf[entry.row]).push(entry);
    }
    for (const entries of found.values()) entries.sort((a, b) => b.adds - a.adds);
    return found;
  }

  // Where a token does something, in the order of the text.
  of(row) {
    const found = [];
    for (let entry = this.entryStarts[row]; entry < this.entryStarts[row + 1]; entry++) found.push(this.entry(entry));
    return found;
  }

  // The strongest places of a token that are not close to each other.
  best(row, most, apart = 6) {
    const chosen = [];
    for (const entry of this.of(row).sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight))) {
      if (chosen.length === most) break;
      if (chosen.every(({ position }) => Math.abs(position - entry.position) >= apart)) chosen.push(entry);
    }
    return chosen;
  }

  // The words that a token makes likelier ("promoted") or less likely ("suppressed") where its weight is positive.
  words(row, which) {
    if (!this.writes(row)) return [];
    const { arrays } = this, count = arrays[which].length / this.rows, found = [];
    for (let i = row * count; i < (row + 1) * count; i++) {
      const share = arrays[`${which}_logits`][i] / 127;
      if (share) found.push({ id: arrays[which][i], logit: share * arrays.word_scales[row], share: Math.abs(share) });
    }
    return found;
  }

  neighbours(row) {
    const { near, near_cosines: cosines } = this.arrays, count = near.length / this.rows, found = [];
    for (let i = row * count; i < (row + 1) * count; i++) {
      if (cosines[i]) found.push({ token: near[i], cosine: cosines[i] / 127 });
    }
    return found;
  }

  // How much a token did in each stage of its run, against the mean token of its layer; the last is this model.
  useByStage(row) {
    const { stage_use: use } = this.arrays, count = this.facts.stages.length + 1;
    return Array.from(use.subarray(row * count, (row + 1) * count), (steps) => steps / 16);
  }

  guesses(position) {
    const { guess_ids: ids, guess_shares: shares } = this.arrays;
    const rows = this.facts.image ? 1 : this.positions, count = ids.length / rows, first = this.facts.image ? 0 : position;
    return Array.from({ length: count }, (_, i) => ({ id: ids[first * count + i], share: shares[first * count + i] / 65535 }));
  }

  // Of what a layer adds at a position, the share by new tokens; the mean over some layers.
  newShare(position, layers = this.seen) {
    const sum = layers.reduce((total, layer) => total + this.newShareIn(layer, position), 0);
    return sum / Math.max(1, layers.length);
  }

  newShareIn(layer, position) {
    return this.arrays.new_shares[this.seenNumber.get(layer) * this.positions + position] / 255;
  }

  word(id) {
    return this.facts.words[id] ?? `id ${id}`;
  }

  // A position as it is called in a sentence; the later bytes of a character have a number only.
  piece(position) {
    const piece = this.facts.pieces[position].replaceAll("\n", "");
    return piece.trim() ? piece : "␣".repeat(piece.length) || this.word(this.arrays.ids[position]);
  }

  around(position, before = 22, after = 12) {
    const text = (from, to) => this.facts.pieces.slice(Math.max(0, from), to).join("").replaceAll("\n", "");
    if (this.facts.image) return { before: "", here: this.piece(position), after: "" };
    return {
      before: text(position - before, position),
      here: this.piece(position),
      after: text(position + 1, position + 1 + after),
    };
  }

  layerTitle(layer) {
    const { block, title } = this.layers[layer];
    return block === null ? title : `block ${block}, ${title}`;
  }

  tokenTitle(row) {
    return `#${this.token(row)} in ${this.layerTitle(this.layerOf[row])}`;
  }

  ageTitle(row) {
    const age = this.age(row), steps = this.facts.growth;
    if (age < 0) return "of unknown age";
    if (age === 0) return steps.length ? "there from the beginning" : "";
    return `came with growth step ${age}: ${steps[age - 1]}`;
  }
}
