// How a grid kernel walks its table: the blocks of many problems, in phases.
//
// A grid kernel runs a sequence of problems in one launch.  Problems of one phase do not depend on each other; what a
// phase writes, later phases may read.  The table has one record for each problem, ordered by phase, and the words
// that the problems are made of: addresses, each as a base (the arena, an input, an output) and an offset, then dims.
// The blocks of a phase are numbered from 0 across its problems, and thread block t of G takes t, t + G, t + 2 G, ...
// The table ends with two records whose phase is the number of phases and whose other fields are 0.
// A pack has one phase and as many thread blocks as blocks: each searches the records for its own.
#ifndef TS_GRID_H_
#define TS_GRID_H_

struct ts_record {
  int32_t phase;
  int32_t kernel;      // which of the grid kernel's bodies; plus TS_KEEPS and TS_RECALLS
  int32_t words;       // its first word in the table
  int32_t addresses;   // how many of its words are addresses
  int32_t count;       // of its words
  int32_t begin, end;  // its blocks within the phase
  int32_t before;      // blocks of the phase before; 0 in the first phase
};

enum { TS_BASE_SHIFT = 48 };  // an address word is base << TS_BASE_SHIFT | offset

// Operands that do not change (weights) stay in shared memory: a problem with TS_KEEPS leaves there what its blocks read
// of them, the same blocks of the same body read it from there in the next phase, with TS_RECALLS.
enum { TS_KEEPS = 1 << 16, TS_RECALLS = 1 << 17, TS_BODY = TS_KEEPS - 1 };

// A launch's parameter.  It runs all phases from that of record `first` to `end`, exclusive; for a pack, `end` is the
// number of problems.
template <int BASES>
struct ts_grid {
  const ts_record* records;
  const int64_t* words;
  uint32_t* counters;  // 1 + the number of phases, all 0 before and after; null where one phase is run
  int64_t first, end;
  int64_t kept;  // where kept operands begin in shared memory; negative: nothing is kept
  int64_t bases[BASES];
};

// Where a thread block is: the record it works on, and its block within the phase.
struct ts_walk {
  const ts_record* next;  // behind `ahead`
  ts_record at, ahead;
  int32_t block;
};

// Moves on to the record that holds `block`; in every new phase thread block t begins at block t.
TS_FN void ts_seek(ts_walk& w, int32_t end, int32_t t) {
  while (w.block >= w.at.end && w.at.phase < end) {
    const int32_t phase = w.at.phase;
    w.at = w.ahead;
    w.ahead = *w.next++;
    if (w.at.phase != phase) w.block = t;
  }
}

// The first place of thread block t; one whose phase is `end` means that there is no work left.
TS_FN ts_walk ts_start(const ts_record* records, int32_t end, int32_t t) {
  ts_walk w = {records + 2, records[0], records[1], t};
  ts_seek(w, end, t);
  return w;
}

// The value of a word of the table.
TS_FN int64_t ts_word(int64_t word, bool address, const int64_t* bases) {
  return address ? bases[word >> TS_BASE_SHIFT] + (word & ((int64_t{1} << TS_BASE_SHIFT) - 1)) : word;
}

#endif  // TS_GRID_H_
