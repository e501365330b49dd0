#ifndef TF_STITCH_CUSTOM_OPS_PAUSE_H_
#define TF_STITCH_CUSTOM_OPS_PAUSE_H_

namespace tf_stitch {

// For loops that look at something again and again for a short time. Not a yield: where others want the core, that
// gives them a time slice, milliseconds, while who goes on looking, or sleeps until it is woken, goes on at once.
inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");  // the instruction of that name is a pause
#endif
}

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_PAUSE_H_
