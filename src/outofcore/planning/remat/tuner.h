// Tuning: a local search over the residencies of gaps, judged by the schedule of their copies.
//
// tuner.py defines states and schedules. tests/unit/naive_schedule.py adds up times in the same order, so both results
// are equal to the last bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "chains.h"
#include "search.h"

namespace remat {

// The costs of copies, and the homes of gaps. Lists of lists are concatenated, as in Step.
struct Transfers {
    Index homes, limit;  // number of homes, and the bytes that large blocks may take
    double weight;       // cost of a second of copying, in seconds of a step
    const Index *storage, *segment, *first_content, *slot;                  // by gap
    const Index *cyclic, *arriving, *fetched, *final, *fixed, *frozen, *arrives;  // by gap: 0 or 1
    const Index *homes_from, *homes_of;                                     // by gap
    const double *in_seconds, *out_seconds;                                 // by gap and home
    const Index* capacity;                                                  // by home; negative: unlimited
};

// The copies of a state, and the seconds of the step with them.
struct Schedule {
    double seconds = 0.0, copied = 0.0;
    std::vector<double> starts;           // by op, and the end of the last one
    std::vector<double> waited;           // by gap, seconds that ops waited for its copies
    std::vector<Index> flowing;           // by op, bytes that are still being copied out when it starts
    std::vector<Index> release, arrival;  // by gap, the op before which its room is free, its copy in starts; or kNever
};

// A tuner's present state, for tuner.py.
struct View {
    double value, seconds, copied;
    const Index *kind, *fetch, *home, *open, *release, *arrival;  // by gap
    const double *starts, *waited;                                // by op and the end, by gap
};

class Tuner : public Search {
public:
    Tuner(const Step& step, const Gaps& gaps, const Transfers& transfers)
        : Search(step, gaps), t_(transfers), home_(gaps.count, kNever), spared_(step.ops), room_(step.ops),
          delta_(step.ops + 1), spare_(step.ops), end_(gaps.count), open_(gaps.count), is_dirty_(gaps.count),
          by_start_(gaps.count), by_start_from_(step.ops + 1), first_of_(gaps.count), copying_(gaps.count),
          op_seconds_(step.seconds, step.seconds + step.ops), earliest_(gaps.count), arrived_(gaps.count),
          at_home_(transfers.homes), lanes_(transfers.homes), can_recompute_(gaps.count), extents_(gaps.count),
          held_for_chains_(step.ops), resident_(step.ops), is_stale_(gaps.count), is_deferred_(gaps.count) {
        counts_overload_ = false;
        for (Schedule* timing : {&now_, &next_}) {
            timing->starts.resize(step.ops + 1), timing->waited.resize(gaps.count), timing->flowing.resize(step.ops);
            timing->release.resize(gaps.count), timing->arrival.resize(gaps.count);
        }
        for (Index g = 0; g < g_.count; ++g) {
            first_of_[g] = g > 0 && t_.storage[g - 1] == t_.storage[g] ? first_of_[g - 1] : g;
            if (first_of_[g] == g) storages_.push_back(g);
            if (t_.arriving[g])
                home_[g] = 0;
            else
                movable_.push_back(g), ++by_start_from_[s_.start[g] + 1];
        }
        for (Index op = 0; op < s_.ops; ++op) by_start_from_[op + 1] += by_start_from_[op];
        std::vector<Index> at(by_start_from_);
        for (const Index g : movable_) by_start_[at[s_.start[g]]++] = g;
        for (const Index g : free_) can_recompute_[g] = true;
        for (Index g = 0; g < g_.count; ++g) count(g);
        for (const Index first : storages_) find_copies(first);
    }

    // Go to a state, repair it if it does not fit, and schedule its copies, based on the last schedule for as long as
    // that makes it shorter. False if the repair fails; then there is no state to tune. `leaving` gaps are never kept.
    bool begin(const Index* kind, const Index* fetch, const Index* home, const Index* spared, const Index* leaving,
               double slack, Index passes) {
        spared_.assign(spared, spared + s_.ops);
        leaves_.assign(leaving, leaving + g_.count);
        slack_ = slack, random_ = Random(0);
        go_to(kind, fetch, home);
        start_trial();
        if (!repair(kNever) || !fits_homes()) return false;
        has_previous_ = false;
        std::fill(now_.flowing.begin(), now_.flowing.end(), 0);
        schedule(kAnyTime);
        std::swap(now_, next_);
        has_previous_ = true;
        schedule(kAnyTime);
        std::swap(now_, next_);
        for (Index pass = 1; pass < passes; ++pass) {
            if (!schedule(value_of(now_)) || next_.seconds >= now_.seconds * kShorter) break;
            std::swap(now_, next_);
        }
        return true;
    }

    // Change gaps at random, and keep changes that do not slow the step; a share of them is about recomputation.
    void tune(Index tries, double recomputes, std::uint64_t seed) {
        random_ = Random(seed), recomputes_ = recomputes;
        double value = value_of(now_);
        for (Index tried = 0; tried < tries && !movable_.empty(); ++tried) {
            start_trial();
            if (change() && repair(changed_) && fits_homes() && schedule(value)) {
                std::swap(now_, next_);
                value = value_of(now_);
            } else {
                undo_trial();
            }
        }
    }

    View view() const {
        return {value_of(now_), now_.seconds, now_.copied, kind_.data(), fetch_.data(), home_.data(), open_.data(),
                now_.release.data(), now_.arrival.data(), now_.starts.data(), now_.waited.data()};
    }

private:
    static constexpr Index kNever = -1;
    // The passes end with a schedule that is longer than this share of the previous one.
    static constexpr double kShorter = 0.9999;
    // Probability that the gap to change is drawn from the gaps that ops waited for.
    static constexpr double kWaited = 0.6;
    // Probabilities for an offloaded gap: move it to another home, if there is one; and, if a chain reads it early,
    // switch between one early fetch and a copy for each chain.
    static constexpr double kElsewhere = 0.3, kThrough = 0.2;
    // The number of repairs after which a state that does not fit is abandoned.
    static constexpr int kRepairs = 500;

    double value_of(const Schedule& found) const { return found.seconds + t_.weight * found.copied; }

    // States

    void go_to(const Index* kind, const Index* fetch, const Index* home) {
        defers_updates_ = true;
        // Keep all gaps that will change first, since resident contents make more chains possible.
        for (const Index g : movable_) {
            start_trial();
            if (kind_[g] != kResident && (kind[g] != kind_[g] || fetch[g] != fetch_[g])) alter(g, kResident, g_.end[g]);
        }
        for (const Index g : movable_) {
            start_trial();
            if (kind_[g] != kind[g]) alter(g, kind[g], fetch[g]);
            set_home(g, (kind[g] == kOffloaded || leaves_[g]) && home[g] == kNever ? default_home(g) : home[g]);
        }
        defers_updates_ = false;
        for (const Index g : deferred_) is_deferred_[g] = false, update_gap(g);
        deferred_.clear();
    }

    void start_trial() { homes_before_.clear(), change_count_ = 0; }

    void undo_trial() {
        for (; !homes_before_.empty(); homes_before_.pop_back()) {
            home_[homes_before_.back().first] = homes_before_.back().second;
            update_gap(homes_before_.back().first);
        }
        while (change_count_ > 0) toggle(trial_[--change_count_]);
    }

    void set_home(Index g, Index home) {
        if (home == home_[g]) return;
        homes_before_.push_back({g, home_[g]});
        home_[g] = home;
        update_gap(g);
    }

    bool alter(Index g, Index kind, Index fetch) {
        if (change_count_ == trial_.size()) trial_.emplace_back();
        if (!weigh(g, kind, fetch, kAnyTime, trial_[change_count_])) return false;
        toggle(trial_[change_count_++]);
        return true;
    }

    // Make a change, or undo it if it was made.
    void toggle(Change& change) {
        apply(change);
        update_gap(change.gap);
        for (std::size_t i = 0; i < change.count; ++i) {
            const Replacement& replaced = change.replacements[i];
            const Chain& chain = chain_[replaced.at];
            op_seconds_[replaced.at] = s_.seconds[replaced.at] + chain.seconds;
            for (const std::vector<Index>* reads : {&replaced.chain.reads, &chain.reads})
                for (const Index content : *reads)
                    for (Index j = s_.gaps_from[content]; j < s_.gaps_from[content + 1]; ++j) update_gap(s_.gaps[j]);
        }
    }

    // Keep a gap, or offload it.
    bool move(Index g, Index home) {
        if (home == kNever && leaves_[g]) return false;
        set_home(g, home);
        const bool is_done = kind_[g] == kResident || (kind_[g] == kOffloaded && home != kNever);
        return is_done || alter(g, kResident, g_.end[g]);
    }

    bool has_home(Index g) const { return t_.homes_from[g] < t_.homes_from[g + 1]; }

    Index random_home(Index g) {
        const Index first = t_.homes_from[g], count = t_.homes_from[g + 1] - first;
        return t_.homes_of[count > 1 ? first + random_.below(count) : first];
    }

    // The nearest unlimited home, or the last home.
    Index default_home(Index g) const {
        for (Index i = t_.homes_from[g]; i < t_.homes_from[g + 1]; ++i)
            if (t_.capacity[t_.homes_of[i]] < 0 || i + 1 == t_.homes_from[g + 1]) return t_.homes_of[i];
        return kNever;
    }

    // Changes

    bool change() {
        const bool is_recomputation = !free_.empty() && random_.unit() < recomputes_;
        Index g = draw_waited_gap();
        changed_ = kNever;
        if (is_recomputation) return change_recomputation(g != kNever && can_recompute_[g] ? g : random_.any_of(free_));
        return change_home(g != kNever ? g : random_.any_of(movable_));
    }

    // Draw a gap that ops waited for, weighted by seconds; or kNever.
    Index draw_waited_gap() {
        if (random_.unit() >= kWaited) return kNever;
        double remaining = 0.0;
        for (const Index g : movable_) remaining += now_.waited[g];
        remaining *= random_.unit();
        for (const Index g : movable_)
            if (now_.waited[g] > 0.0 && (remaining -= now_.waited[g]) <= 0.0) return g;
        return kNever;
    }

    bool change_home(Index g) {
        if (kind_[g] == kRecomputed || !has_home(g)) return false;
        if (home_[g] == kNever) return move(g, random_home(g));
        if (t_.homes_from[g + 1] - t_.homes_from[g] > 1 && random_.unit() < kElsewhere) return move(g, random_home(g));
        const bool is_read_early = kind_[g] == kOffloaded || (!t_.cyclic[g] && end_[g] < g_.end[g]);
        if (is_read_early && random_.unit() < kThrough)
            return alter(g, kind_[g] == kOffloaded ? kResident : kOffloaded, g_.end[g]);
        changed_ = g;
        return move(g, kNever);
    }

    bool change_recomputation(Index g) {
        find_early_fetches(g);
        options_ = early_fetches_;
        options_.push_back(g_.end[g]);
        if (kind_[g] == kRecomputed) {
            options_.erase(std::remove(options_.begin(), options_.end(), fetch_[g]), options_.end());
            options_.push_back(kNever);
        }
        const Index at = random_.any_of(options_);
        if (at != kNever) return alter(g, kRecomputed, at);
        if (has_home(g) && random_.unit() < 0.5) return move(g, random_home(g));
        changed_ = g;
        return move(g, kNever);
    }

    // Change gaps other than `but` until all ops have the bytes that they need.
    bool repair(Index but) {
        for (int turn = 0; turn < kRepairs; ++turn) {
            const Index worst = measure_room();
            if (worst >= 0) return true;
            const Index op = std::find(room_.begin(), room_.end(), worst) - room_.begin();
            helpful_gaps_.clear(), sufficient_gaps_.clear();
            for (const Index g : movable_) {
                if (g == but || !can_free_room(g, op)) continue;
                helpful_gaps_.push_back(g);
                if (g_.bytes[g] >= -worst) sufficient_gaps_.push_back(g);
            }
            if (helpful_gaps_.empty()) return false;
            const std::vector<Index>& gaps = sufficient_gaps_.empty() ? helpful_gaps_ : sufficient_gaps_;
            if (!free_room(random_.any_of(gaps), op)) return false;
        }
        return false;
    }

    // Whether changing a gap can free room at an op.
    bool can_free_room(Index g, Index op) const {
        if (kind_[g] == kRecomputed)
            return fetch_[g] <= op && (op < g_.end[g] || (op == fetch_[g] && need_[op] > g_.alone[op])) &&
                   (fetch_[g] < g_.end[g] || has_home(g));
        if (home_[g] == kNever)
            return has_home(g) && (t_.cyclic[g] ? open_[g] && covers(g, op) : s_.start[g] < op && op < g_.end[g]);
        return kind_[g] == kResident && !t_.cyclic[g] && end_[g] <= op && op < g_.end[g];
    }

    bool free_room(Index g, Index op) {
        if (kind_[g] == kRecomputed)
            return fetch_[g] < g_.end[g] ? alter(g, kRecomputed, g_.end[g]) : move(g, default_home(g));
        if (home_[g] == kNever) set_home(g, default_home(g));
        // If a chain reads it before this op, each chain must copy it in for itself.
        return covers(g, op) || alter(g, kOffloaded, g_.end[g]);
    }

    bool covers(Index g, Index op) const {
        if (t_.cyclic[g]) return op > s_.start[g] || op < end_[g];
        return s_.start[g] < op && op < end_[g];
    }

    // Room

    // The ops over which a gap counts.
    struct Extent {
        Index held_from = 0;   // from here on it is held for chains that read it, or because it is recomputed
        Index end = 0;         // its end, or the first chain that reads it
        Index lane = kNever;   // the home that it is copied in from
        bool is_open = false;  // whether it can be offloaded before `end`
        bool is_resident = false;
    };

    Extent extent_of(Index g) const {
        const Index start = s_.start[g], end = g_.end[g];
        Extent result;
        result.held_from = result.end = end;
        if (t_.arriving[g]) {
            result.is_open = true;
        } else if (kind_[g] == kRecomputed) {
            result.held_from = fetch_[g];
        } else if (t_.cyclic[g]) {
            result.end = end - s_.ops;
            result.is_open = !is_read_inside(g);
        } else {
            if (kind_[g] == kResident)
                for (const Index at : readers_[g_.content[g]])
                    if (start < at && at < result.end) result.end = at;
            result.held_from = result.end;
            result.is_open = result.end > start + 1 || t_.final[g];
        }
        result.is_resident = result.is_open && home_[g] == kNever;
        const bool comes_back = t_.fetched[g] || (!t_.cyclic[g] && result.end < end);
        result.lane = result.is_open && !result.is_resident && comes_back ? home_[g] : kNever;
        return result;
    }

    void count(Index g) {
        const Extent& now = extents_[g] = extent_of(g);
        end_[g] = now.end, open_[g] = now.is_open;
        add(g, g_.bytes[g]);
        if (now.lane != kNever) lanes_[now.lane].insert(place_in_lane(g), g);
    }

    // Update a gap after a change to it or to the chains that read it; deferred, so once, during many changes.
    void update_gap(Index g) {
        if (defers_updates_) {
            if (!is_deferred_[g]) is_deferred_[g] = true, deferred_.push_back(g);
            return;
        }
        if (!is_stale_[first_of_[g]]) is_stale_[first_of_[g]] = true, stale_.push_back(first_of_[g]);
        const Extent &was = extents_[g], now = extent_of(g);
        if (was.held_from == now.held_from && was.end == now.end && was.lane == now.lane &&
            was.is_open == now.is_open && was.is_resident == now.is_resident)
            return;
        add(g, -g_.bytes[g]);
        if (was.lane != kNever) lanes_[was.lane].erase(place_in_lane(g));
        count(g);
    }

    std::vector<Index>::iterator place_in_lane(Index g) {
        std::vector<Index>& lane = lanes_[extents_[g].lane];
        const auto comes_first = [this](Index a, Index b) { return std::pair(end_[a], a) < std::pair(end_[b], b); };
        return std::lower_bound(lane.begin(), lane.end(), g, comes_first);
    }

    void add(Index g, Index bytes) {
        const auto hold = [bytes](std::vector<Index>& held, Index first, Index last) {
            for (Index op = first; op < last; ++op) held[op] += bytes;
        };
        const Extent& extent = extents_[g];
        if (t_.arriving[g] || (t_.cyclic[g] && extent.is_open && !extent.is_resident)) return;
        if (t_.cyclic[g]) {
            std::vector<Index>& held = extent.is_open ? resident_ : held_for_chains_;
            hold(held, s_.start[g] + 1, s_.ops), hold(held, 0, extent.end);
            return;
        }
        hold(held_for_chains_, extent.held_from, g_.end[g]);
        if (extent.is_resident) hold(resident_, s_.start[g] + 1, extent.end);
    }

    // Measure the room at each op, and return the smallest.
    Index measure_room() {
        Index min_room = std::numeric_limits<Index>::max();
        for (Index op = 0; op < s_.ops; ++op) {
            // An op that fits by itself must still fit when bytes are spared.
            const Index free = t_.limit - need_[op] - held_for_chains_[op];
            room_[op] = (free > 0 ? std::max(free - spared_[op], Index{0}) : free) - resident_[op];
            min_room = std::min(min_room, room_[op]);
        }
        return min_room;
    }

    // Whether a chain reads the content of a cyclic gap in it.
    bool is_read_inside(Index g) const {
        for (const Index at : readers_[g_.content[g]])
            if (at > s_.start[g]) return true;
        for (const Index at : readers_[t_.first_content[g]])
            if (at < g_.end[g] - s_.ops) return true;
        return false;
    }

    // Whether the offloaded gaps fit the homes.
    bool fits_homes() {
        for (Index home = 0; home < t_.homes; ++home) {
            if (t_.capacity[home] < 0) continue;
            std::fill(delta_.begin(), delta_.end(), 0);
            for (Index first = 0, last; first < g_.count; first = last) {
                last = end_of_storage(first);
                Index from = s_.ops, to = 0;
                for (Index g = first; g < last; ++g) {
                    if (t_.arriving[g] || !is_offloaded(g) || home_[g] != home) continue;
                    // A frozen storage keeps its slot from step to step.
                    const bool is_lasting = t_.cyclic[g] || t_.frozen[g];
                    from = is_lasting ? 0 : std::min(from, s_.start[g]);
                    to = is_lasting ? s_.ops : std::max(to, g_.end[g] + 1);
                }
                if (from < to && !t_.fixed[first]) delta_[from] += t_.slot[first], delta_[to] -= t_.slot[first];
            }
            Index held = 0;
            for (const Index more : delta_)
                if ((held += more) > t_.capacity[home]) return false;
        }
        return true;
    }

    Index end_of_storage(Index g) const {
        const Index storage = t_.storage[g];
        while (g < g_.count && t_.storage[g] == storage) ++g;
        return g;
    }

    // Copies

    bool is_offloaded(Index g) const { return open_[g] && home_[g] != kNever; }

    double in_seconds(Index g) const { return t_.in_seconds[g * t_.homes + home_[g]]; }
    double out_seconds(Index g) const { return t_.out_seconds[g * t_.homes + home_[g]]; }

    // Find which gaps of a storage need a copy out, because the copy at home is out of date; and all copies' seconds.
    void find_copies(Index first) {
        const Index last = end_of_storage(first);
        std::fill(at_home_.begin(), at_home_.end(), kNever);
        Index leaves = last;
        bool is_cyclic = false;
        for (Index g = first; g < last; ++g) {
            is_dirty_[g] = false;
            if (t_.arriving[g]) {
                at_home_[0] = 0;
            } else if (is_offloaded(g)) {
                leaves = std::min(leaves, g);
                if (t_.cyclic[g]) at_home_[home_[g]] = 0, is_cyclic = true;
            }
        }
        if (leaves < last && t_.arrives[first])
            at_home_[0] = 0;
        else if (leaves < last && t_.frozen[first] && !is_cyclic)
            at_home_[home_[leaves]] = 0;
        copying_[first] = 0.0;
        for (Index g = first; g < last; ++g) {
            if (!is_offloaded(g)) continue;
            if (extents_[g].lane != kNever) copying_[first] += in_seconds(g);
            if (t_.arriving[g] || at_home_[home_[g]] == t_.segment[g]) continue;
            is_dirty_[g] = true, at_home_[home_[g]] = t_.segment[g], copying_[first] += out_seconds(g);
        }
        is_stale_[first] = false;
    }

    // Find when each copy in may start: just in time by the previous schedule, less the slack.
    void find_earliest() {
        for (const std::vector<Index>& lane : lanes_) {
            double due = kAnyTime;
            for (auto g = lane.rbegin(); g != lane.rend(); ++g) {
                due = std::min(due, now_.starts[end_[*g]]) - in_seconds(*g);
                earliest_[*g] = due - slack_ * in_seconds(*g);
            }
        }
    }

    // Schedule the copies of the state, based on the present schedule; false if its value surely exceeds a limit.
    bool schedule(double limit) {
        for (const Index first : stale_) find_copies(first);
        stale_.clear();
        copied_ = 0.0;
        for (const Index first : storages_) copied_ += copying_[first];
        const double max_seconds = limit - t_.weight * copied_;
        if (has_previous_) find_earliest();
        for (Index op = 0; op < s_.ops; ++op) spare_[op] = room_[op] - now_.flowing[op];
        std::fill(next_.release.begin(), next_.release.end(), kNever);
        std::fill(next_.arrival.begin(), next_.arrival.end(), kNever);
        std::fill(next_.waited.begin(), next_.waited.end(), 0.0);
        out_done_.assign(t_.homes, 0.0), in_done_.assign(t_.homes, 0.0);
        heads_.assign(t_.homes, 0), due_.assign(t_.homes, 0), blocked_.assign(t_.homes, kNever);
        leaving_ = {};
        outgoing_ = ahead_ = 0, clock_ = 0.0;
        for (Index op = 0; op < s_.ops; ++op) {
            if (clock_ > max_seconds) return false;
            while (!leaving_.empty() && leaving_.top().first <= clock_) release(op);
            // The copies in of the chain precede prefetches for later ops, since its runs wait for them.
            const Index last = t_.homes - 1;
            for (Index home = 0; home < t_.homes; ++home) fetch(home, op, home < last || chain_[op].copying == 0.0);
            double chain_begins = 0.0, for_chain = 0.0;
            if (chain_[op].copying > 0.0) {
                chain_begins = std::max(in_done_[last], clock_);
                for_chain = in_done_[last] = chain_begins + chain_[op].copying;
                fetch(last, op, true);
            }
            for (Index home = 0; home < t_.homes; ++home) {
                const std::vector<Index>& lane = lanes_[home];
                for (std::size_t& due = due_[home]; due < lane.size() && end_[lane[due]] == op; ++due) {
                    if (next_.arrival[lane[due]] < op) ahead_ -= g_.bytes[lane[due]];
                    wait(arrived_[lane[due]], lane[due]);
                }
            }
            next_.flowing[op] = outgoing_;
            while (!leaving_.empty() && outgoing_ + ahead_ > room_[op]) wait_for_room(op);
            clock_ = std::max(clock_, chain_begins);
            next_.starts[op] = clock_;
            clock_ = std::max(clock_ + op_seconds_[op], for_chain + s_.seconds[op]);
            for (Index i = by_start_from_[op]; i < by_start_from_[op + 1]; ++i) start_copy_out(by_start_[i], op);
        }
        next_.starts[s_.ops] = clock_;
        for (const double done : out_done_) clock_ = std::max(clock_, done);
        next_.seconds = clock_, next_.copied = copied_;
        return clock_ <= max_seconds;
    }

    void wait(double until, Index g) {
        if (until <= clock_) return;
        next_.waited[g] += until - clock_;
        clock_ = until;
    }

    // Free the room of the copy out that ends first.
    void release(Index op) {
        const Index g = leaving_.top().second;
        leaving_.pop();
        outgoing_ -= g_.bytes[g];
        next_.release[g] = op;
    }

    void wait_for_room(Index op) {
        wait(leaving_.top().first, leaving_.top().second);
        release(op);
    }

    // Start the copies in from a home that an op needs, which wait for room; and, if `ahead`, others that have room.
    void fetch(Index home, Index op, bool ahead) {
        const std::vector<Index>& lane = lanes_[home];
        for (std::size_t& head = heads_[home]; head < lane.size(); ++head) {
            const Index g = lane[head];
            const bool begins_at_home = t_.cyclic[g] || t_.arriving[g];
            if (end_[g] > op) {
                if (!ahead) return;
                if (has_previous_ && now_.starts[op + 1] <= earliest_[g]) return;
                if (!begins_at_home && next_.release[g] == kNever) return;  // its copy out has not ended
                if (op <= blocked_[home] || room_[op] - outgoing_ - ahead_ < g_.bytes[g]) return;
                // The last op without room for it; it need not be tried again before that.
                Index last = end_[g] - 1;
                while (last >= op && spare_[last] >= g_.bytes[g]) --last;
                if (last >= op) {
                    blocked_[home] = last;
                    return;
                }
                ahead_ += g_.bytes[g];
                for (Index i = op; i < end_[g]; ++i) spare_[i] -= g_.bytes[g];
            } else if (!begins_at_home) {
                while (next_.release[g] == kNever) wait_for_room(op);
            }
            blocked_[home] = kNever;
            next_.arrival[g] = op;
            in_done_[home] = std::max(in_done_[home], clock_) + in_seconds(g);
            arrived_[g] = in_done_[home];
        }
    }

    void start_copy_out(Index g, Index op) {
        if (!is_offloaded(g)) return;
        if (!is_dirty_[g]) {
            next_.release[g] = op + 1;
            return;
        }
        double& done = out_done_[home_[g]];
        done = std::max(done, clock_) + out_seconds(g);
        leaving_.push({done, g});
        outgoing_ += g_.bytes[g];
    }

    using Leaving = std::pair<double, Index>;  // the end of a copy out, and its gap

    const Transfers t_;
    std::vector<Index> home_;                           // by gap; kNever: resident, if it is not recomputed
    std::vector<Index> spared_, room_, delta_, spare_;  // by op: bytes to leave free, bytes for copies, and scratch
    std::vector<Index> end_, open_;                     // by gap: as in its Extent
    std::vector<char> is_dirty_;                        // by gap, whether it needs a copy out
    std::vector<Index> by_start_, by_start_from_;  // gaps by the op that they start after
    std::vector<Index> first_of_;                  // by gap, the first of its storage
    std::vector<double> copying_;                  // by the first gap of a storage, the seconds of its copies
    std::vector<Index> storages_;                  // the first gap of each
    std::vector<double> op_seconds_, earliest_, arrived_;
    std::vector<Index> at_home_;             // by home, the segment of the copy there
    std::vector<std::vector<Index>> lanes_;  // by home, gaps in the order in which they are needed back
    std::vector<char> can_recompute_;        // by gap
    std::vector<Extent> extents_;                    // by gap
    std::vector<Index> held_for_chains_, resident_;  // by op, bytes
    std::vector<char> is_stale_;                     // by the first gap of a storage, whether find_copies must run
    std::vector<Index> leaves_;                      // by gap, whether it must be offloaded
    std::vector<Index> stale_, movable_, helpful_gaps_, sufficient_gaps_, blocked_;
    std::vector<std::size_t> heads_, due_;    // by home, the first of its lane that is not fetched yet, and not due yet
    std::vector<double> out_done_, in_done_;  // by home, the end of the last copy
    std::priority_queue<Leaving, std::vector<Leaving>, std::greater<Leaving>> leaving_;
    std::vector<std::pair<Index, Index>> homes_before_;  // gaps that this trial has moved, with their homes before
    std::vector<Change> trial_;
    std::size_t change_count_ = 0;
    Index changed_ = kNever, outgoing_ = 0, ahead_ = 0;  // bytes being copied out, and prefetched for later ops
    Schedule now_, next_;
    double slack_ = 0.0, recomputes_ = 0.0, copied_ = 0.0, clock_ = 0.0;
    bool has_previous_ = false, defers_updates_ = false;
    std::vector<char> is_deferred_;  // by gap, whether its update is deferred
    std::vector<Index> deferred_;
};

}  // namespace remat
