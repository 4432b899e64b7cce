// The inner loops of placement: best fit over the skyline, first fit, ejection and the canonical search.
//
// compiled.py calls these functions through ctypes and documents them; canonical.py and the package's docstring explain
// the searches. Everything here is deterministic: integers, a fixed random generator, and effort counted in rectangles
// inspected.
//
// Rectangles are parallel arrays: held over slots of time [begin, end) and, if they return, [again, over). These are
// beyond all slots if they do not return.

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Bytes = std::int64_t;
using Index = std::int32_t;

constexpr Bytes kFar = Bytes{1} << 60;  // the offset of unplaced rectangles

struct Layout {
    std::int64_t count, slots, base;
    const Bytes* sizes;
    const Bytes* alignments;
    const std::int64_t *begin, *end, *again, *over;
};

Bytes round_up(Bytes value, Bytes step) { return step == 1 ? value : (value + step - 1) / step * step; }

// ------------------------------------------------------------------------------------------------------- skyline

// Segments of a circle of time, each from its start to the next segment's, with their heights.
class Skyline {
public:
    Skyline(const Layout& layout, const double* worth, double snug) : l_(layout), snug_(snug) {
        const std::int64_t count = l_.count, period = l_.slots;
        std::vector<std::int64_t> from(count), length(count);
        for (std::int64_t i = 0; i < count; ++i) {
            const bool two = l_.over[i] <= period, around = two && l_.begin[i] == 0 && l_.over[i] == period;
            from[i] = around ? l_.again[i] : l_.begin[i];
            length[i] = (around ? l_.end[i] + period : two ? l_.over[i] : l_.end[i]) - from[i];
        }
        order_.resize(count);
        std::iota(order_.begin(), order_.end(), 0);
        std::stable_sort(order_.begin(), order_.end(), [&](Index a, Index b) {
            return std::make_pair(from[a], -length[a]) < std::make_pair(from[b], -length[b]);
        });
        // Repeat all rectangles one period later, so that a segment over the end of time is one contiguous range.
        for (int round = 0; round < 2; ++round) {
            for (const Index i : order_) {
                begin_.push_back(from[i] + round * period);
                length_.push_back(length[i]);
                worth_.push_back(worth[i]);
            }
        }
        first_.resize(2 * period + 1);
        std::size_t at = 0;
        for (std::int64_t slot = 0; slot <= 2 * period; ++slot) {
            while (at < begin_.size() && begin_[at] < slot) ++at;
            first_[slot] = static_cast<Index>(at);
        }
    }

    void place(Bytes* offsets) {
        add(0, l_.base);
        for (std::int64_t remaining = l_.count; remaining;) {
            const auto [level, start] = heap_.top();
            heap_.pop();
            const std::size_t at = position(start);
            if (at == starts_.size() || starts_[at] != start || levels_[at] != level) continue;  // outdated
            const std::int64_t best_entry = best(at);
            if (best_entry < 0) {
                raise(at);
                continue;
            }
            const std::int64_t entry = best_entry % l_.count;
            worth_[entry] = worth_[entry + l_.count] = -1;
            const Index chosen = order_[entry];
            offsets[chosen] = round_up(level, l_.alignments[chosen]);
            cover(at, begin_[best_entry], length_[best_entry], offsets[chosen] + l_.sizes[chosen]);
            --remaining;
        }
    }

private:
    std::size_t position(std::int64_t start) const {
        return std::lower_bound(starts_.begin(), starts_.end(), start) - starts_.begin();
    }

    std::int64_t end_of(std::size_t at) const {
        return at + 1 < starts_.size() ? starts_[at + 1] : starts_[0] + l_.slots;
    }

    // Return the rectangle with the most worth that fits the segment, as an index into the repeated ones, or -1.
    std::int64_t best(std::size_t at) const {
        const bool flat = starts_.size() == 1;  // everything fits
        const std::int64_t start = starts_[at], end = end_of(at);
        const std::int64_t low = flat ? 0 : first_[start], high = flat ? l_.count : first_[end];
        std::int64_t best_entry = -1;
        double best_worth = -1;
        for (std::int64_t i = low; i < high; ++i) {
            const std::int64_t ends = begin_[i] + length_[i];
            if (worth_[i] < 0 || (!flat && ends > end)) continue;
            const double worth = flat ? worth_[i] : worth_[i] + snug_ * ((ends == end) + (begin_[i] == start));
            if (worth > best_worth) best_worth = worth, best_entry = i;
        }
        return best_entry;
    }

    // Set the level of [begin, begin + length) in a segment.
    void cover(std::size_t at, std::int64_t begin, std::int64_t length, Bytes level) {
        const Bytes former = levels_[at];
        const std::int64_t period = l_.slots;
        if (length == period) {
            levels_[at] = level;
            heap_.emplace(level, starts_[at]);
            return;
        }
        const bool flat = starts_.size() == 1;
        const std::int64_t start = flat ? begin : starts_[at], end = flat ? begin + period : end_of(at);
        remove(at);
        if (start < begin) add(start % period, former);
        add(begin % period, level);
        if (begin + length < end) add((begin + length) % period, former);
        join(begin % period);
        join(end % period);
    }

    // Raise a segment to its lower neighbour's level.
    void raise(std::size_t at) {
        const std::size_t count = starts_.size(), after = (at + 1) % count;
        const std::int64_t start = starts_[at], end = starts_[after];
        levels_[at] = std::min(levels_[(at + count - 1) % count], levels_[after]);
        heap_.emplace(levels_[at], start);
        join(end);
        join(start);
    }

    void add(std::int64_t start, Bytes level) {
        const auto at = std::upper_bound(starts_.begin(), starts_.end(), start) - starts_.begin();
        starts_.insert(starts_.begin() + at, start);
        levels_.insert(levels_.begin() + at, level);
        heap_.emplace(level, start);
    }

    void remove(std::size_t at) {
        starts_.erase(starts_.begin() + at);
        levels_.erase(levels_.begin() + at);
    }

    // Remove a boundary between equal levels; one boundary always stays.
    void join(std::int64_t start) {
        const std::size_t at = position(start), count = starts_.size();
        if (at == count || count == 1 || starts_[at] != start) return;
        if (levels_[(at + count - 1) % count] == levels_[at]) remove(at);
    }

    const Layout& l_;
    const double snug_;
    std::vector<Index> order_, first_;
    std::vector<std::int64_t> begin_, length_, starts_;
    std::vector<double> worth_;
    std::vector<Bytes> levels_;
    using Low = std::pair<Bytes, std::int64_t>;
    std::priority_queue<Low, std::vector<Low>, std::greater<Low>> heap_;
};

// ----------------------------------------------------------------------------------------------------- first fit

bool share_a_moment(const Layout& l, std::int64_t a, std::int64_t b) {
    return (l.begin[a] < l.end[b] && l.begin[b] < l.end[a]) || (l.again[a] < l.end[b] && l.begin[b] < l.over[a]) ||
           (l.begin[a] < l.over[b] && l.again[b] < l.end[a]) ||
           (l.over[a] <= l.slots && l.again[a] < l.over[b] && l.again[b] < l.over[a]);
}

void first_fit(const Layout& l, const std::int64_t* order, Bytes* offsets) {
    std::vector<Index> placed;  // in order of their offsets
    for (std::int64_t k = 0; k < l.count; ++k) {
        const std::int64_t index = order[k];
        Bytes at = round_up(l.base, l.alignments[index]);
        for (const Index other : placed) {
            if (offsets[other] >= at + l.sizes[index]) break;
            const Bytes top = offsets[other] + l.sizes[other];
            if (top > at && share_a_moment(l, index, other)) at = round_up(top, l.alignments[index]);
        }
        offsets[index] = at;
        const auto place = std::upper_bound(placed.begin(), placed.end(), at,
                                            [&](Bytes value, Index other) { return value < offsets[other]; });
        placed.insert(place, static_cast<Index>(index));
    }
}

// ------------------------------------------------------------------------------------------------------ ejection

// Called every kGlance rectangles to decide whether to stop. Leaves the answer unchanged after Ctrl-C, which is then
// raised again for Python to handle after this library returns.
using Stop = void (*)(std::int64_t* answer);
bool must_stop(Stop stop) {
    std::int64_t answer = -1;
    stop(&answer);
    if (answer < 0) std::raise(SIGINT);
    return answer != 0;
}
constexpr std::int64_t kGlance = std::int64_t{1} << 22;  // rectangles inspected between two calls of `Stop`

class Ejection {
public:
    Ejection(const Layout& layout, const Bytes* offsets, std::int64_t effort, Stop stop)
        : l_(layout), near_(layout.count), effort_(effort), stop_(stop), glance_(effort) {
        start_from(offsets);
        const Bytes largest = *std::max_element(l_.sizes, l_.sizes + l_.count);
        for (std::int64_t i = 0; i < l_.count; ++i) {
            // The square root: pushing a small rectangle is better than a large one, but not any number of small ones.
            const double share = static_cast<double>(l_.sizes[i]) / static_cast<double>(largest);
            burden_.push_back(1 + static_cast<std::int64_t>(std::sqrt(share * (1 << 20))));
        }
        weights_ = burden_;
    }

    // Lower the placement towards the goal, and write the lowest one found.
    void improve(Bytes goal, Bytes* best) {
        Bytes height = height_of(best);
        double step = kFirstStep;
        const std::int64_t patience = std::min(effort_ / 20, 100 * l_.count * (kMove + l_.count));
        for (int rounds = 0; height > goal && effort_ > 0 && rounds < kRounds;) {
            const Bytes ceiling = std::max(goal, height - std::max<Bytes>(1, (height - goal) * step));
            lower(ceiling);
            if (settle(patience)) {
                std::copy(offsets_.begin(), offsets_.end(), best);
                height = height_of(best);
                step = std::min(2 * step, kFirstStep);
            } else if (step > kMinStep && ceiling < height - 1) {
                step /= 2;
            } else {  // the ceiling is next to the height: start again from the best, with the weights found so far
                start_from(best);
                step = kFirstStep;
                ++rounds;
            }
        }
    }

private:
    static constexpr std::int64_t kMove = 250;  // effort of a move without its neighbours
    static constexpr int kRounds = 4;           // number of times that all ceilings may fail
    // The distance of the first ceiling and the smallest step, as shares of the way to the goal.
    static constexpr double kFirstStep = 0.25, kMinStep = 1.0 / 128;

    Bytes height_of(const Bytes* offsets) const {
        Bytes height = l_.base;
        for (std::int64_t i = 0; i < l_.count; ++i) height = std::max(height, offsets[i] + l_.sizes[i]);
        return height;
    }

    // Take out the rectangles above a ceiling, which may be higher than the last one.
    void lower(Bytes ceiling) {
        ceiling_ = ceiling;
        for (std::int64_t i = 0; i < l_.count; ++i) {
            if (offsets_[i] < kFar && offsets_[i] + l_.sizes[i] > ceiling) eject(i);
        }
    }

    // Place rectangles until all are placed; false if the effort runs out.
    bool settle(std::int64_t patience) {
        const std::int64_t last = std::max<std::int64_t>(effort_ - patience, 0);
        while (!out_.empty()) {
            if (effort_ <= last) return false;
            if (stop_ && effort_ < glance_) {
                glance_ = effort_ - kGlance;
                if (must_stop(stop_)) {
                    effort_ = 0;
                    return false;
                }
            }
            std::swap(out_[draw(out_.size())], out_.back());
            const Index index = out_.back();
            out_.pop_back();
            push_in(index);
        }
        return true;
    }

    void push_in(Index index) {
        const Bytes size = l_.sizes[index], last = ceiling_ - size, alignment = l_.alignments[index];
        std::int64_t near = 0;
        for (std::int64_t i = 0; i < l_.count; ++i) near += near_[i] = i != index && share_a_moment(l_, index, i);
        effort_ -= kMove + near + l_.count / 8;
        const Bytes bottom = round_up(l_.base, alignment);
        if (bottom > last) {  // it does not fit below the ceiling even alone
            out_.push_back(index);
            return;
        }
        std::int64_t in_the_way = 0, min_weight = INT64_MAX, equals = 0;
        Bytes chosen = 0;
        auto reached = by_offset_.begin(), passed = by_top_.begin();  // rectangles before these begin, or end, below
        const auto try_at = [&](Bytes place) {
            for (; reached != by_offset_.end() && reached->first < place + size; ++reached) {
                if (near_[reached->second]) in_the_way += weights_[reached->second];
            }
            for (; passed != by_top_.end() && passed->first <= place; ++passed) {
                if (near_[passed->second]) in_the_way -= weights_[passed->second];
            }
            if (in_the_way < min_weight) min_weight = in_the_way, equals = 0;
            if (in_the_way == min_weight && draw(++equals) == 0) chosen = place;
        };
        try_at(bottom);
        for (auto below = by_top_.begin(); min_weight && below != by_top_.end(); ++below) {
            if (!near_[below->second]) continue;
            const Bytes place = round_up(below->first, alignment);
            if (place > last) break;
            try_at(place);
        }
        if (min_weight) {
            for (std::int64_t i = 0; i < l_.count; ++i) {
                if (near_[i] && offsets_[i] < chosen + size && offsets_[i] + l_.sizes[i] > chosen) {
                    weights_[i] += burden_[i];
                    eject(i);
                }
            }
        }
        offsets_[index] = chosen;
        insert(by_offset_, {chosen, index});
        insert(by_top_, {chosen + size, index});
    }

    void eject(std::int64_t index) {
        const Index entry = static_cast<Index>(index);
        remove(by_offset_, {offsets_[index], entry});
        remove(by_top_, {offsets_[index] + l_.sizes[index], entry});
        offsets_[index] = kFar;
        out_.push_back(entry);
    }

    // Start from a complete placement.
    void start_from(const Bytes* offsets) {
        offsets_.assign(offsets, offsets + l_.count);
        out_.clear();
        by_offset_.clear();
        by_top_.clear();
        for (std::int64_t i = 0; i < l_.count; ++i) {
            by_offset_.emplace_back(offsets_[i], static_cast<Index>(i));
            by_top_.emplace_back(offsets_[i] + l_.sizes[i], static_cast<Index>(i));
        }
        std::sort(by_offset_.begin(), by_offset_.end());
        std::sort(by_top_.begin(), by_top_.end());
    }

    using Order = std::vector<std::pair<Bytes, Index>>;  // placed blocks, ascending
    static void insert(Order& order, Order::value_type entry) {
        order.insert(std::lower_bound(order.begin(), order.end(), entry), entry);
    }
    static void remove(Order& order, Order::value_type entry) {
        order.erase(std::lower_bound(order.begin(), order.end(), entry));
    }

    // Return a random number below a limit, by xorshift64* (Vigna, arXiv 1402.6246).
    std::size_t draw(std::size_t limit) {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return (state_ * 0x2545F4914F6CDD1DULL >> 32) * limit >> 32;
    }

    const Layout& l_;
    std::vector<Bytes> offsets_;
    std::vector<std::int64_t> burden_, weights_;
    std::vector<char> near_;  // whether a rectangle shares a moment with the next one to place
    Order by_offset_, by_top_;
    std::vector<Index> out_;  // rectangles that are not placed
    std::int64_t effort_;
    Stop stop_;
    std::int64_t glance_;
    Bytes ceiling_ = 0;
    std::uint64_t state_ = 0x9E3779B97F4A7C15ULL;
};

// ---------------------------------------------------------------------------------------------- canonical search

struct Techniques {
    bool dominance, lifting, sections, precedence, decomposition;
};

enum class CanonicalResult { kNone, kFound, kStopped };

class Canonical {
public:
    Canonical(const Layout& layout, Bytes capacity, const std::int64_t* order, const Techniques& techniques,
              std::int64_t nodes, std::int64_t effort, Stop stop)
        : l_(layout), t_(techniques), capacity_(capacity), nodes_(nodes), effort_(effort), stop_(stop),
          glance_(effort), order_(order, order + layout.count), rank_(layout.count), near_(layout.count),
          ranges_(layout.count), offsets_(layout.count, kFar), pushed_(layout.count), bound_(layout.count) {
        for (std::int64_t k = 0; k < l_.count; ++k) rank_[order_[k]] = static_cast<Index>(k);
        find_sections();
        for (std::int64_t i = 0; i < l_.count; ++i) {
            pushed_[i] = bound_[i] = round_up(l_.base, l_.alignments[i]);
            each_section(i, [&](Index s) { members_[s].push_back(static_cast<Index>(i)); });
            each_cut(i, [&](Index s) { ++cuts_[s]; });
        }
        for (const std::vector<Index>& members : members_) {
            effort_ -= static_cast<std::int64_t>(members.size() * members.size());
        }
        if (effort_ <= 0) return;  // the search stops at once
        std::vector<Index> seen(l_.count, -1);
        for (std::int64_t i = 0; i < l_.count; ++i) {
            seen[i] = static_cast<Index>(i);
            each_section(i, [&](Index s) {
                for (const Index other : members_[s]) {
                    if (seen[other] != i) near_[i].push_back(other);
                    seen[other] = static_cast<Index>(i);
                }
            });
        }
        for (std::size_t s = 0; s < members_.size(); ++s) touch(static_cast<Index>(s));
    }

    CanonicalResult search() {
        std::vector<Index> all(l_.count);
        std::iota(all.begin(), all.end(), 0);
        return descend(all, l_.base, 0);
    }

    const std::vector<Bytes>& offsets() const { return offsets_; }
    std::int64_t effort() const { return effort_; }

private:
    struct Range {
        Index begin, end, again, over;  // sections; the second range may be empty
    };

    // Find the moments with a live set that is not part of the next or the previous one.
    void find_sections() {
        std::vector<std::pair<std::int64_t, int>> events;  // a slot; 0: something ends, 1: something begins
        for (std::int64_t i = 0; i < l_.count; ++i) {
            events.emplace_back(l_.begin[i], 1);
            events.emplace_back(l_.end[i], 0);
            if (l_.over[i] > l_.slots) continue;
            events.emplace_back(l_.again[i], 1);
            events.emplace_back(l_.over[i], 0);
        }
        std::sort(events.begin(), events.end());
        std::vector<std::int64_t> moments;
        std::int64_t begun = -1;
        for (const auto& [slot, begins] : events) {
            if (begins) {
                begun = slot;
            } else if (begun >= 0) {
                moments.push_back(begun);
                begun = -1;
            }
        }
        const auto section = [&](std::int64_t slot) {
            return static_cast<Index>(std::lower_bound(moments.begin(), moments.end(), slot) - moments.begin());
        };
        for (std::int64_t i = 0; i < l_.count; ++i) {
            ranges_[i] = {section(l_.begin[i]), section(l_.end[i]), section(l_.again[i]), section(l_.over[i])};
        }
        members_.resize(moments.size());
        cuts_.resize(moments.size());
        dirty_.resize(moments.size());
    }

    template <class Visit>
    void each_section(std::int64_t i, Visit visit) {
        for (Index s = ranges_[i].begin; s < ranges_[i].end; ++s) visit(s);
        for (Index s = ranges_[i].again; s < ranges_[i].over; ++s) visit(s);
    }

    // Visit each section that a rectangle connects with the next one, cyclically. A gap that is not around the end of
    // time counts as held.
    template <class Visit>
    void each_cut(std::int64_t i, Visit visit) {
        const Range& r = ranges_[i];
        const Index count = static_cast<Index>(members_.size());
        if (r.again < r.over && r.begin == 0 && r.over == count) {
            for (Index s = r.again; s < count; ++s) visit(s);
            for (Index s = 0; s + 1 < r.end; ++s) visit(s);
        } else {
            for (Index s = r.begin; s + 1 < std::max(r.end, r.over < count + 1 && r.again < r.over ? r.over : 0); ++s) {
                visit(s);
            }
        }
    }

    bool open(Index i) const { return offsets_[i] == kFar; }

    void touch(Index section) {
        if (dirty_[section]) return;
        dirty_[section] = 1;
        queue_.push_back(section);
    }

    void raise(Index i, Bytes bound) {
        raised_.emplace_back(i, bound_[i]);
        bound_[i] = round_up(bound, l_.alignments[i]);
        each_section(i, [&](Index s) { touch(s); });
    }

    // Update the bounds in sections where bounds have risen; return false if the open rectangles cannot fit.
    bool propagate() {
        bool fits = true;
        for (std::size_t at = 0; at < queue_.size(); ++at) {
            dirty_[queue_[at]] = 0;
            fits = fits && section_fits(queue_[at]);
        }
        queue_.clear();
        return fits;
    }

    bool section_fits(Index section) {
        // Sort the open rectangles to the front by descending bound; the order is stored, as it changes little.
        std::vector<Index>& all = members_[section];
        std::size_t count = 0;
        for (std::size_t k = 0; k < all.size(); ++k) {
            const Index i = all[k];
            if (!open(i)) continue;
            std::size_t to = count++;
            std::swap(all[k], all[to]);
            for (; to && bound_[all[to - 1]] < bound_[i]; --to) all[to] = all[to - 1];
            all[to] = i;
        }
        effort_ -= static_cast<std::int64_t>(all.size() + count);
        // Above each bound there must be room for the rectangle and all with bounds that are no lower.
        Bytes total = 0;
        for (std::size_t k = 0; k < count; ++k) {
            total += l_.sizes[all[k]];
            if (bound_[all[k]] + total > capacity_) return false;
        }
        if (!t_.precedence) return true;
        // A rectangle that cannot be below all others is above one that can.
        const Bytes slack = capacity_ - total;
        Bytes min_top = kFar;
        std::size_t k = count;
        for (; k && bound_[all[k - 1]] <= slack; --k) {
            min_top = std::min(min_top, bound_[all[k - 1]] + l_.sizes[all[k - 1]]);
        }
        while (k--) {
            const Index i = all[k];
            if (bound_[i] >= min_top) continue;
            if (min_top + l_.sizes[i] > capacity_) return false;
            raise(i, min_top);
        }
        return true;
    }

    // Raise the bounds of open rectangles, which come after (last, rank) in canonical order; false if impossible.
    bool lift(const std::vector<Index>& open_rectangles, Bytes last, Index rank) {
        for (const Index i : open_rectangles) {
            Bytes bound = pushed_[i];
            if (t_.lifting && passed_over(i, last, rank)) {
                Bytes above = kFar;
                for (const Index other : near_[i]) {
                    if (open(other)) above = std::min(above, std::max(bound_[other], last) + l_.sizes[other]);
                }
                effort_ -= static_cast<std::int64_t>(near_[i].size());
                if (above + l_.sizes[i] > capacity_) return false;
                bound = std::max(bound, above);
            }
            if (bound > bound_[i]) raise(i, bound);
        }
        return true;
    }

    bool passed_over(Index i, Bytes last, Index rank) const {
        return pushed_[i] < last || (pushed_[i] == last && rank_[i] < rank);
    }

    CanonicalResult descend(const std::vector<Index>& part, Bytes last, Index rank) {
        const std::size_t mark = raised_.size();
        const CanonicalResult answer = choose(part, last, rank);
        if (answer != CanonicalResult::kFound) {
            for (; raised_.size() > mark; raised_.pop_back()) bound_[raised_.back().first] = raised_.back().second;
        }
        return answer;
    }

    CanonicalResult choose(const std::vector<Index>& part, Bytes last, Index rank) {
        if (part.empty()) return CanonicalResult::kFound;
        if (!nodes_ || effort_ <= 0 || should_stop()) return CanonicalResult::kStopped;
        --nodes_;
        effort_ -= static_cast<std::int64_t>(part.size());
        const bool fits = lift(part, last, rank);
        if (!fits) {
            for (const Index s : queue_) dirty_[s] = 0;
            queue_.clear();
        }
        if (!fits || !propagate()) return CanonicalResult::kNone;
        // The next rectangle is below the lowest top, since the rectangle with that top would fit below it.
        Bytes lowest_top = kFar;
        if (t_.dominance) {
            for (const Index i : part) lowest_top = std::min(lowest_top, pushed_[i] + l_.sizes[i]);
        }
        std::vector<std::pair<Bytes, Index>> choices;
        for (const Index i : part) {
            // A rectangle with a bound above its present offset waits for the rectangles below it.
            if (bound_[i] == pushed_[i] && !passed_over(i, last, rank) && pushed_[i] < lowest_top) {
                choices.emplace_back(pushed_[i], rank_[i]);
            }
        }
        std::sort(choices.begin(), choices.end());
        for (const auto& [offset, at] : choices) {
            const CanonicalResult answer = try_at(part, order_[at], offset);
            if (answer != CanonicalResult::kNone) return answer;
        }
        return CanonicalResult::kNone;
    }

    CanonicalResult try_at(const std::vector<Index>& part, Index chosen, Bytes offset) {
        const std::size_t mark = pushes_.size();
        const Bytes top = offset + l_.sizes[chosen];
        offsets_[chosen] = offset;
        bool fits = true;
        for (const Index other : near_[chosen]) {
            if (!open(other) || pushed_[other] >= top) continue;
            pushes_.emplace_back(other, pushed_[other]);
            pushed_[other] = round_up(top, l_.alignments[other]);
            fits = fits && pushed_[other] + l_.sizes[other] <= capacity_;
        }
        effort_ -= static_cast<std::int64_t>(near_[chosen].size());
        CanonicalResult answer = CanonicalResult::kNone;
        if (fits) {
            bool apart = false;
            each_cut(chosen, [&](Index s) { apart |= --cuts_[s] == 0; });
            answer = apart && t_.decomposition ? each_part(part, offset, rank_[chosen])
                                               : descend(without(part, chosen), offset, rank_[chosen]);
            if (answer == CanonicalResult::kFound) return answer;
            each_cut(chosen, [&](Index s) { ++cuts_[s]; });
        }
        for (; pushes_.size() > mark; pushes_.pop_back()) pushed_[pushes_.back().first] = pushes_.back().second;
        offsets_[chosen] = kFar;
        return answer;
    }

    std::vector<Index> without(const std::vector<Index>& part, Index chosen) const {
        std::vector<Index> remaining;
        remaining.reserve(part.size() - 1);
        for (const Index i : part) {
            if (i != chosen) remaining.push_back(i);
        }
        return remaining;
    }

    // Solve groups of sections that no open rectangle connects separately.
    CanonicalResult each_part(const std::vector<Index>& part, Bytes last, Index rank) {
        const Index count = static_cast<Index>(members_.size());
        std::vector<Index> label(count);
        Index labels = 0;
        for (Index s = 0; s < count; ++s) {
            label[s] = labels;
            labels += cuts_[s] == 0;
        }
        // The last section is followed by the first.
        if (labels) for (Index s = 0; s < count; ++s) label[s] %= labels;
        std::vector<std::vector<Index>> parts(std::max<Index>(labels, 1));
        for (const Index i : part) {
            if (open(i)) parts[label[ranges_[i].begin]].push_back(i);
        }
        effort_ -= count;
        std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
        const std::size_t mark = pushes_.size(), bounds = raised_.size();
        for (std::size_t k = 0; k < parts.size(); ++k) {
            const CanonicalResult answer = descend(parts[k], last, rank);
            if (answer == CanonicalResult::kFound) continue;
            // Undo the parts before this one, too.
            for (std::size_t before = 0; before < k; ++before) {
                for (const Index i : parts[before]) {
                    offsets_[i] = kFar;
                    each_cut(i, [&](Index s) { ++cuts_[s]; });
                }
            }
            for (; pushes_.size() > mark; pushes_.pop_back()) pushed_[pushes_.back().first] = pushes_.back().second;
            for (; raised_.size() > bounds; raised_.pop_back()) bound_[raised_.back().first] = raised_.back().second;
            return answer;
        }
        return CanonicalResult::kFound;
    }

    bool should_stop() {
        if (!stop_ || effort_ >= glance_) return false;
        glance_ = effort_ - kGlance;
        return must_stop(stop_);
    }

    const Layout& l_;
    const Techniques t_;
    const Bytes capacity_;
    std::int64_t nodes_, effort_;
    Stop stop_;
    std::int64_t glance_;
    std::vector<std::int64_t> order_;
    std::vector<Index> rank_;
    std::vector<std::vector<Index>> near_, members_;  // members_: of each section
    std::vector<Range> ranges_;
    std::vector<Bytes> offsets_;
    std::vector<Bytes> pushed_;  // the lowest offset above the placed rectangles
    std::vector<Bytes> bound_;   // a lower bound of the offset; at least pushed_, once lift has run
    std::vector<Index> cuts_;    // the number of open rectangles that connect a section with the next one
    std::vector<char> dirty_;
    std::vector<Index> queue_;  // the dirty sections
    std::vector<std::pair<Index, Bytes>> pushes_, raised_;
};

}  // namespace

EXPORT void outofcore_best_fit(const Layout* layout, const double* worth, double snug, Bytes* offsets) {
    Skyline(*layout, worth, snug).place(offsets);
}

EXPORT void outofcore_first_fit(const Layout* layout, const std::int64_t* order, Bytes* offsets) {
    first_fit(*layout, order, offsets);
}

EXPORT void outofcore_eject(const Layout* layout, Bytes goal, std::int64_t effort, Stop stop, Bytes* offsets) {
    Ejection(*layout, offsets, effort, stop).improve(goal, offsets);
}

// Return 0 if there is no placement, 1 if one was found, 2 if stopped. `effort` is reduced by the effort spent.
EXPORT int outofcore_canonical(const Layout* layout, Bytes capacity, const std::int64_t* order, std::int64_t techniques,
                               std::int64_t nodes, std::int64_t* effort, Stop stop, Bytes* offsets) {
    const Techniques chosen{(techniques & 1) != 0, (techniques & 2) != 0, true, (techniques & 4) != 0,
                            (techniques & 8) != 0};
    Canonical search(*layout, capacity, order, chosen, nodes, *effort, stop);
    const CanonicalResult answer = search.search();
    *effort = search.effort();
    if (answer == CanonicalResult::kFound) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
    return static_cast<int>(answer);
}
