// Values by key, the most recently used ones.
#ifndef TF_STITCH_CUSTOM_OPS_LRU_CACHE_H_
#define TF_STITCH_CUSTOM_OPS_LRU_CACHE_H_

#include <cstddef>
#include <list>
#include <map>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace tf_stitch {

// Keys are found by their order, or by `Hash` where it is given.  Not thread-safe: its owner holds a lock.
template <class Key, class Value, class Hash = void>
class LruCache {
 public:
  explicit LruCache(size_t capacity) : capacity_(capacity) {}

  // The value of a key, which becomes the most recently used one; null when it is not there.
  const Value* Find(const Key& key) {
    if (!entries_.empty() && entries_.front().first == key) return &entries_.front().second;
    auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->second;
  }

  // Adds a key that is not there.  The least recently used one goes when there are too many; returns its value, which
  // its owner may want to drop without the lock.
  Value Add(const Key& key, Value value) {
    entries_.emplace_front(key, std::move(value));
    by_key_[key] = entries_.begin();
    if (entries_.size() <= capacity_) return Value();
    Value gone = std::move(entries_.back().second);
    by_key_.erase(entries_.back().first);
    entries_.pop_back();
    return gone;
  }

 private:
  using Entries = std::list<std::pair<Key, Value>>;
  using Place = typename Entries::iterator;

  const size_t capacity_;
  Entries entries_;  // most recent first
  std::conditional_t<std::is_void_v<Hash>, std::map<Key, Place>, std::unordered_map<Key, Place, Hash>> by_key_;
};

}  // namespace tf_stitch

#endif  // TF_STITCH_CUSTOM_OPS_LRU_CACHE_H_
