// Tuning: a local search over what becomes of each gap, judged by when copies run.
//
// tuner.py says what a state is, and what the schedule of copies minds. tests/unit/naive_schedule.py adds times up in the
// same order, so that both give the same to the last bit.

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

// What copies take, and where the bytes of gaps may go. Lists of lists lie one after the other, as in Step.
struct Transfers {
    Index homes, limit;  // how many homes there are, and the bytes that large blocks may take
    double weight;       // seconds of a step that a second of copying counts for
    const Index *storage, *segment, *first_content, *slot;                  // by gap
    const Index *cyclic, *arriving, *fetched, *fixed, *frozen, *arrives;    // by gap, whether it is so
    const Index *homes_from, *homes_of;                                     // by gap
    const double *in_seconds, *out_seconds;                                 // by gap and home
    const Index* capacity;                                                  // by home; negative: not limited
};

// The copies of a state, and what the step takes with them.
struct Schedule {
    double seconds = 0.0, copied = 0.0;
    std::vector<double> starts;           // by op, and when the last one ends
    std::vector<double> waited;           // by gap, seconds that ops waited for its copies
    std::vector<Index> flowing;           // by op, bytes that are still to leave when it starts
    std::vector<Index> release, arrival;  // by gap, the op before which it has left, or starts to come; or kNever
};

// A tuner's present state, for those who read it.
struct View {
    double value, seconds, copied;
    const Index *kind, *fetch, *home;           // by gap
    const Index *end, *open, *release, *arrival;  // by gap
    const Index *free, *flowing;                // by op
    const double *op_seconds, *starts, *waited;   // by op, by op and the end, by gap
};

class Tuner : public Search {
public:
    Tuner(const Step& step, const Gaps& gaps, const Transfers& transfers)
        : Search(step, gaps), t_(transfers), home_(gaps.count, kNever), spared_(step.ops), left_(step.ops), room_(step.ops),
          delta_(step.ops + 1), spare_(step.ops), end_(gaps.count), open_(gaps.count), is_dirty_(gaps.count),
          by_start_(gaps.count), by_start_from_(step.ops + 1), due_(gaps.count), due_from_(step.ops + 2),
          op_seconds_(step.ops), soonest_(gaps.count), arrived_(gaps.count), at_home_(transfers.homes),
          lanes_(transfers.homes), can_recompute_(gaps.count) {
        counts_overload_ = false;
        for (Schedule* each : {&now_, &next_}) {
            each->starts.resize(step.ops + 1), each->waited.resize(gaps.count), each->flowing.resize(step.ops);
            each->release.resize(gaps.count), each->arrival.resize(gaps.count);
        }
        for (Index g = 0; g < g_.count; ++g) {
            if (t_.arriving[g])
                home_[g] = 0;
            else
                movable_.push_back(g), ++by_start_from_[s_.start[g] + 1];
        }
        for (Index op = 0; op < s_.ops; ++op) by_start_from_[op + 1] += by_start_from_[op];
        std::vector<Index> at(by_start_from_);
        for (const Index g : movable_) by_start_[at[s_.start[g]]++] = g;
        for (const Index g : free_) can_recompute_[g] = true;
    }

    // Go to a state in which everything is offloaded that is not recomputed. False if it cannot be made to fit.
    bool ease(const Index* kind, const Index* fetch) {
        std::fill(spared_.begin(), spared_.end(), 0);
        random_ = Random(0);
        std::vector<Index> home(g_.count);
        for (Index g = 0; g < g_.count; ++g) home[g] = usual_home(g);
        go_to(kind, fetch, home.data());
        start_trial();
        return repair(kNever);
    }

    // Go to a state, with more offloaded, copied in for chains or recomputed later where it does not fit, and schedule
    // its copies, again and again with the last schedule in mind for as long as it gets shorter. False if the state can
    // not be made to fit; then the tuner has no state.
    bool begin(const Index* kind, const Index* fetch, const Index* home, const Index* spared, double slack,
               Index passes) {
        spared_.assign(spared, spared + s_.ops);
        slack_ = slack, random_ = Random(0);
        go_to(kind, fetch, home);
        start_trial();
        if (!repair(kNever) || !fits_homes()) return false;
        has_before_ = false;
        std::fill(now_.flowing.begin(), now_.flowing.end(), 0);
        schedule(kAnyTime);
        std::swap(now_, next_);
        has_before_ = true;
        schedule(kAnyTime);
        std::swap(now_, next_);
        for (Index pass = 1; pass < passes; ++pass) {
            if (!schedule(value_of(now_)) || next_.seconds >= now_.seconds * kShorter) break;
            std::swap(now_, next_);
        }
        return true;
    }

    // Change gaps at random, and keep what is no slower.
    void tune(Index tries, std::uint64_t seed) {
        random_ = Random(seed);
        double value = value_of(now_);
        for (Index tried = 0; tried < tries && !movable_.empty(); ++tried) {
            start_trial();
            if (change() && repair(changed_) && fits_homes() && schedule(value)) {
                std::swap(now_, next_);
                value = value_of(now_);
            } else {
                take_back();
            }
        }
    }

    View view() {
        measure();
        for (Index op = 0; op < s_.ops; ++op) op_seconds_[op] = seconds_of(op);
        return {value_of(now_), now_.seconds, now_.copied, kind_.data(), fetch_.data(), home_.data(), end_.data(),
                open_.data(), now_.release.data(), now_.arrival.data(), left_.data(), now_.flowing.data(),
                op_seconds_.data(), now_.starts.data(), now_.waited.data()};
    }

private:
    static constexpr Index kNever = -1;
    // A schedule that is no shorter than this, as a share of the one before, ends the passes.
    static constexpr double kShorter = 0.9999;
    // How often a gap to change is drawn from those that ops waited for.
    static constexpr double kWaited = 0.6;
    // How often a change is about what is recomputed; of what is not: how often it goes to another home, if there is one,
    // and how often a chain copies in for itself what it reads early, or no longer does.
    static constexpr double kRecomputes = 0.5, kElsewhere = 0.3, kThrough = 0.2;
    // After so many changes a state that does not fit is given up.
    static constexpr int kRepairs = 200;

    double value_of(const Schedule& found) const { return found.seconds + t_.weight * found.copied; }
    double seconds_of(Index op) const { return s_.seconds[op] + chain_[op].seconds + chain_[op].copying; }

    // States

    void go_to(const Index* kind, const Index* fetch, const Index* home) {
        // What is kept makes more chains possible, so everything that will change is kept first.
        for (const Index g : movable_)
            if (kind_[g] != kKept && (kind[g] != kind_[g] || fetch[g] != fetch_[g])) set(g, kKept, g_.end[g]);
        for (const Index g : movable_) {
            if (kind_[g] != kind[g]) set(g, kind[g], fetch[g]);
            home_[g] = kind[g] == kAway && home[g] == kNever ? usual_home(g) : home[g];
        }
    }

    void start_trial() { homes_before_.clear(), change_count_ = 0; }

    void take_back() {
        for (; !homes_before_.empty(); homes_before_.pop_back())
            home_[homes_before_.back().first] = homes_before_.back().second;
        while (change_count_ > 0) apply(trial_[--change_count_]);
    }

    void put(Index g, Index home) {
        if (home == home_[g]) return;
        homes_before_.push_back({g, home_[g]});
        home_[g] = home;
    }

    bool alter(Index g, Index kind, Index fetch) {
        if (change_count_ == trial_.size()) trial_.emplace_back();
        if (!weigh(g, kind, fetch, kAnyTime, trial_[change_count_])) return false;
        apply(trial_[change_count_++]);
        return true;
    }

    // Keep a gap, or offload it.
    bool move(Index g, Index home) {
        put(g, home);
        const bool is_done = kind_[g] == kKept || (kind_[g] == kAway && home != kNever);
        return is_done || alter(g, kKept, g_.end[g]);
    }

    bool has_home(Index g) const { return t_.homes_from[g] < t_.homes_from[g + 1]; }

    Index any_home(Index g) {
        const Index first = t_.homes_from[g], count = t_.homes_from[g + 1] - first;
        return t_.homes_of[count > 1 ? first + random_.below(count) : first];
    }

    // The nearest home that is not limited, or the last.
    Index usual_home(Index g) const {
        for (Index i = t_.homes_from[g]; i < t_.homes_from[g + 1]; ++i)
            if (t_.capacity[t_.homes_of[i]] < 0 || i + 1 == t_.homes_from[g + 1]) return t_.homes_of[i];
        return kNever;
    }

    // Changes

    bool change() {
        const bool is_recomputation = !free_.empty() && random_.unit() < kRecomputes;
        Index g = waited_gap();
        changed_ = kNever;
        if (is_recomputation) return change_recomputation(g != kNever && can_recompute_[g] ? g : random_.any_of(free_));
        return change_home(g != kNever ? g : random_.any_of(movable_));
    }

    // One of the gaps that ops waited for, the likelier the longer; or kNever.
    Index waited_gap() {
        if (random_.unit() >= kWaited) return kNever;
        double left = 0.0;
        for (const Index g : movable_) left += now_.waited[g];
        left *= random_.unit();
        for (const Index g : movable_)
            if (now_.waited[g] > 0.0 && (left -= now_.waited[g]) <= 0.0) return g;
        return kNever;
    }

    bool change_home(Index g) {
        if (kind_[g] == kAgain || !has_home(g)) return false;
        if (home_[g] == kNever) return move(g, any_home(g));
        if (t_.homes_from[g + 1] - t_.homes_from[g] > 1 && random_.unit() < kElsewhere) return move(g, any_home(g));
        const bool is_read_early = kind_[g] == kAway || (!t_.cyclic[g] && end_[g] < g_.end[g]);
        if (is_read_early && random_.unit() < kThrough) return alter(g, kind_[g] == kAway ? kKept : kAway, g_.end[g]);
        changed_ = g;
        return move(g, kNever);
    }

    bool change_recomputation(Index g) {
        meet(g);
        options_ = meetings_;
        options_.push_back(g_.end[g]);
        if (kind_[g] == kAgain) {
            options_.erase(std::remove(options_.begin(), options_.end(), fetch_[g]), options_.end());
            options_.push_back(kNever);
        }
        const Index at = random_.any_of(options_);
        if (at != kNever) return alter(g, kAgain, at);
        if (has_home(g) && random_.unit() < 0.5) return move(g, any_home(g));
        changed_ = g;
        return move(g, kNever);
    }

    // Change gaps until all ops have the bytes that they need; one gap stays as it is.
    bool repair(Index but) {
        for (int turn = 0; turn < kRepairs; ++turn) {
            measure();
            const auto worst = std::min_element(room_.begin(), room_.end());
            if (worst == room_.end() || *worst >= 0) return true;
            const Index op = worst - room_.begin();
            helpful_.clear(), enough_.clear();
            for (const Index g : movable_) {
                if (g == but || !can_help(g, op)) continue;
                helpful_.push_back(g);
                if (g_.bytes[g] >= -*worst) enough_.push_back(g);
            }
            if (helpful_.empty() || !help(random_.any_of(enough_.empty() ? helpful_ : enough_), op)) return false;
        }
        return false;
    }

    // Whether an op has more room if a gap is changed.
    bool can_help(Index g, Index op) const {
        if (kind_[g] == kAgain)
            return fetch_[g] <= op && (op < g_.end[g] || (op == fetch_[g] && need_[op] > g_.alone[op])) &&
                   (fetch_[g] < g_.end[g] || has_home(g));
        if (home_[g] == kNever)
            return has_home(g) && (t_.cyclic[g] ? open_[g] && covers(g, op) : s_.start[g] < op && op < g_.end[g]);
        return kind_[g] == kKept && !t_.cyclic[g] && end_[g] <= op && op < g_.end[g];
    }

    bool help(Index g, Index op) {
        if (kind_[g] == kAgain) return fetch_[g] < g_.end[g] ? alter(g, kAgain, g_.end[g]) : move(g, usual_home(g));
        if (home_[g] == kNever) put(g, usual_home(g));
        // Where a chain reads it before this op, the chain has to copy it in for itself.
        return covers(g, op) || alter(g, kAway, g_.end[g]);
    }

    bool covers(Index g, Index op) const {
        if (t_.cyclic[g]) return op > s_.start[g] || op < end_[g];
        return s_.start[g] < op && op < end_[g];
    }

    // Room

    // Find when gaps end, about which of them there is something to choose, and the room that is left at each op.
    void measure() {
        const Index n = s_.ops;
        std::fill(delta_.begin(), delta_.end(), 0);
        const auto hold = [this](Index first, Index last, Index bytes) {
            if (first < last) delta_[first] += bytes, delta_[last] -= bytes;
        };
        kept_.clear();
        for (Index g = 0; g < g_.count; ++g) {
            const Index start = s_.start[g], end = g_.end[g], bytes = g_.bytes[g];
            open_[g] = 0, end_[g] = end;
            if (t_.arriving[g]) {
                open_[g] = 1;
            } else if (kind_[g] == kAgain) {
                hold(fetch_[g], end, bytes);
            } else if (t_.cyclic[g]) {
                end_[g] = end - n;
                open_[g] = !is_read_inside(g);
                if (!open_[g]) hold(start + 1, n, bytes), hold(0, end - n, bytes);
            } else {
                if (kind_[g] == kKept)
                    for (const Index at : readers_[g_.content[g]])
                        if (start < at && at < end_[g]) end_[g] = at;
                hold(end_[g], end, bytes);
                open_[g] = end_[g] > start + 1;
            }
            if (open_[g] && home_[g] == kNever) kept_.push_back(g);
        }
        // An op that fits by itself still does if bytes are spared.
        Index held = 0;
        for (Index op = 0; op < n; ++op) {
            held += delta_[op];
            const Index left = t_.limit - need_[op] - held;
            left_[op] = left > 0 ? std::max(left - spared_[op], Index{0}) : left;
        }
        std::fill(delta_.begin(), delta_.end(), 0);
        for (const Index g : kept_) {
            if (t_.cyclic[g])
                hold(s_.start[g] + 1, n, g_.bytes[g]), hold(0, end_[g], g_.bytes[g]);
            else
                hold(s_.start[g] + 1, end_[g], g_.bytes[g]);
        }
        held = 0;
        for (Index op = 0; op < n; ++op) held += delta_[op], room_[op] = left_[op] - held;
    }

    // Whether a chain reads the content of a cyclic gap in it.
    bool is_read_inside(Index g) const {
        for (const Index at : readers_[g_.content[g]])
            if (at > s_.start[g]) return true;
        for (const Index at : readers_[t_.first_content[g]])
            if (at < end_[g]) return true;
        return false;
    }

    // Whether limited homes can hold what leaves.
    bool fits_homes() {
        for (Index home = 0; home < t_.homes; ++home) {
            if (t_.capacity[home] < 0) continue;
            std::fill(delta_.begin(), delta_.end(), 0);
            for (Index first = 0, last; first < g_.count; first = last) {
                last = end_of_storage(first);
                Index from = s_.ops, to = 0;
                for (Index g = first; g < last; ++g) {
                    if (t_.arriving[g] || !is_offloaded(g) || home_[g] != home) continue;
                    // What is frozen is kept at home from step to step.
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

    // Find which gaps leave with a copy out, as their homes are out of date by then, and when copies in are due.
    void find_copies() {
        copied_ = 0.0;
        std::fill(due_from_.begin(), due_from_.end(), 0);
        for (Index first = 0, last; first < g_.count; first = last) {
            last = end_of_storage(first);
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
            for (Index g = first; g < last; ++g) {
                if (!is_offloaded(g)) continue;
                if (is_fetched(g)) ++due_from_[end_[g] + 2], copied_ += in_seconds(g);
                if (t_.arriving[g] || at_home_[home_[g]] == t_.segment[g]) continue;
                is_dirty_[g] = true, at_home_[home_[g]] = t_.segment[g], copied_ += out_seconds(g);
            }
        }
        for (Index op = 0; op < s_.ops; ++op) due_from_[op + 2] += due_from_[op + 1];
        for (Index g = 0; g < g_.count; ++g)
            if (is_offloaded(g) && is_fetched(g)) due_[due_from_[end_[g] + 1]++] = g;
        for (std::vector<Index>& lane : lanes_) lane.clear();
        for (Index i = 0; i < due_from_[s_.ops]; ++i) lanes_[home_[due_[i]]].push_back(due_[i]);
    }

    bool is_fetched(Index g) const { return t_.fetched[g] || (!t_.cyclic[g] && end_[g] < g_.end[g]); }

    // When each copy in may start: just in time by the schedule before, and earlier by the slack.
    void find_soonest() {
        for (const std::vector<Index>& lane : lanes_) {
            double due = kAnyTime;
            for (auto g = lane.rbegin(); g != lane.rend(); ++g) {
                due = std::min(due, now_.starts[end_[*g]]) - in_seconds(*g);
                soonest_[*g] = due - slack_ * in_seconds(*g);
            }
        }
    }

    // Schedule the copies of the state with the present schedule in mind; false if its value is sure to be above a limit.
    bool schedule(double limit) {
        find_copies();
        const double most = limit - t_.weight * copied_;
        if (has_before_) find_soonest();
        for (Index op = 0; op < s_.ops; ++op) spare_[op] = room_[op] - now_.flowing[op];
        std::fill(next_.release.begin(), next_.release.end(), kNever);
        std::fill(next_.arrival.begin(), next_.arrival.end(), kNever);
        std::fill(next_.waited.begin(), next_.waited.end(), 0.0);
        out_done_.assign(t_.homes, 0.0), in_done_.assign(t_.homes, 0.0);
        heads_.assign(t_.homes, 0), blocked_.assign(t_.homes, kNever);
        leaving_ = {};
        outgoing_ = ahead_ = 0, clock_ = 0.0;
        for (Index op = 0; op < s_.ops; ++op) {
            if (clock_ > most) return false;
            while (!leaving_.empty() && leaving_.top().first <= clock_) release(op);
            for (Index home = 0; home < t_.homes; ++home) fetch(home, op);
            for (Index i = due_from_[op]; i < due_from_[op + 1]; ++i) {
                const Index g = due_[i];
                if (next_.arrival[g] < op) ahead_ -= g_.bytes[g];
                wait(arrived_[g], g);
            }
            next_.flowing[op] = outgoing_;
            while (!leaving_.empty() && outgoing_ + ahead_ > room_[op]) wait_for_room(op);
            next_.starts[op] = clock_;
            clock_ += seconds_of(op);
            for (Index i = by_start_from_[op]; i < by_start_from_[op + 1]; ++i) send(by_start_[i], op);
        }
        next_.starts[s_.ops] = clock_;
        for (const double done : out_done_) clock_ = std::max(clock_, done);
        next_.seconds = clock_, next_.copied = copied_;
        return clock_ <= most;
    }

    void wait(double until, Index g) {
        if (until <= clock_) return;
        next_.waited[g] += until - clock_;
        clock_ = until;
    }

    // The copy out that is done first gives its room back.
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

    // Start the copies in from a home that there is room for; those that an op needs wait for room.
    void fetch(Index home, Index op) {
        const std::vector<Index>& lane = lanes_[home];
        for (std::size_t& head = heads_[home]; head < lane.size(); ++head) {
            const Index g = lane[head];
            const bool begins_at_home = t_.cyclic[g] || t_.arriving[g];
            if (end_[g] > op) {
                if (has_before_ && now_.starts[op + 1] <= soonest_[g]) return;
                if (!begins_at_home && next_.release[g] == kNever) return;  // it has not left yet
                if (op <= blocked_[home] || room_[op] - outgoing_ - ahead_ < g_.bytes[g]) return;
                // The last op that has no room for it: until then there is no need to look again.
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

    void send(Index g, Index op) {
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

    using Leaving = std::pair<double, Index>;  // when a copy out is done, and of which gap

    const Transfers t_;
    std::vector<Index> home_;                          // by gap; kNever: kept, if it is not recomputed
    std::vector<Index> spared_, left_, room_, delta_, spare_;  // by op: bytes to leave free; bytes left for what is kept or
                                                               // comes and goes, and for the latter; and scratch
    std::vector<Index> end_, open_;  // by gap: when it ends, at the latest when a chain reads it; whether it may leave
    std::vector<char> is_dirty_;     // by gap, whether it leaves with a copy
    std::vector<Index> by_start_, by_start_from_;  // gaps by the op that they start after
    std::vector<Index> due_, due_from_;            // gaps by the op that needs them back
    std::vector<double> op_seconds_, soonest_, arrived_;
    std::vector<Index> at_home_;              // by home, the segment whose content is there
    std::vector<std::vector<Index>> lanes_;  // by home, gaps in the order in which they are needed back
    std::vector<char> can_recompute_;        // by gap
    std::vector<Index> movable_, kept_, helpful_, enough_, blocked_;
    std::vector<std::size_t> heads_;
    std::vector<double> out_done_, in_done_;  // by home, when the last copy is done
    std::priority_queue<Leaving, std::vector<Leaving>, std::greater<Leaving>> leaving_;
    std::vector<std::pair<Index, Index>> homes_before_;  // what it takes to undo the changes of this trial
    std::vector<Change> trial_;
    std::size_t change_count_ = 0;
    Index changed_ = kNever, outgoing_ = 0, ahead_ = 0;  // bytes that leave, and that have come for later ops
    Schedule now_, next_;
    double slack_ = 0.0, copied_ = 0.0, clock_ = 0.0;
    bool has_before_ = false;
};

}  // namespace remat
