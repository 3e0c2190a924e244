"""Bugs that somebody could write into alerts: one that is lost, one too many, a call to where none should go."""

from __future__ import annotations

from tests.mutants.planting import planter_for_one

ALERTING = "tests/alerts/test_alerting.py"
WEBHOOK = "tests/alerts/test_webhook.py"


mutant = planter_for_one("alerts", "penstock/{}.py")

MUTANTS = [
    mutant("the first start reads all", "alerts/reader", "secrets.token_hex(4), end,", "secrets.token_hex(4), 0,", ALERTING, "nothing_from_before_the_first_start_is_told"),
    mutant("the first cursor is not noted", "alerts/reader", "        self.note(store.now())  #", "        #", ALERTING, "a_reader_that_was_killed_before_it_noted_how_far_it_was_tells_the_same_again"),
    mutant("each start begins at the end", "alerts/reader", 'min(kept["cursor"], end)', "end", ALERTING, "what_happened_while_nobody_read_is_told_later"),
    mutant("a cursor behind the end is believed", "alerts/reader", 'min(kept["cursor"], end)', 'kept["cursor"]', ALERTING, "a_trail_that_is_shorter_than_it_was_is_read_from_its_end"),
    mutant("what was told is forgotten", "alerts/reader", "Repeats(window, told)", "Repeats(window)", ALERTING, "what_was_held_back_survives_a_restart"),
    mutant("an alert about alerts goes out", "alerts/reader", '        if told["kind"] == UNDELIVERED:\n', "        if False:\n", ALERTING, "what_could_not_be_delivered_is_in_the_trail_and_makes_no_further_messages"),
    mutant("addons hear of each other", "alerts/reader", 'self._receivers.of_addon.get(told["addon_id"])', "next(iter(self._receivers.of_addon.values()), None)", ALERTING, "an_addon_has_a_receiver_of_its_own_besides_that_of_all"),
    mutant("stale notices are sent", "alerts/reader", " or event.at + self._dispatchable_for <= now:", ":", ALERTING, "a_stale_notice_of_a_waiting_job_is_not_sent"),
    mutant("repeats are told", "core/alerts", "        if last is not None and last.at <= now < last.at + self._window:\n", "        if False:\n", ALERTING, "of_one_key_one_is_told_in_a_window_and_then_how_many_were_not"),
    mutant("keys are kept for ever", "core/alerts", "        for key in list(self.told)[: max(0, len(self.told) - self.MOST)]:\n", "        for key in ():\n", ALERTING, "what_needs_no_memory_is_forgotten"),
    mutant("a refusal closes the door", "alerts/messenger", "        except Refused as error:\n            self._fails = 0\n", "        except Refused as error:\n            self._fails += 1\n            self._opens_at = now + pause(self._fails)\n", ALERTING, "a_message_that_is_refused_does_not_hold_up_the_others"),
    mutant("a closed door is tried at once", "alerts/messenger", "            self._opens_at = now + pause(self._fails)\n", "", ALERTING, "a_receiver_that_is_away_is_tried_less_and_less_and_then_gets_all_in_order"),
    mutant("nothing is given up", "alerts/messenger", "        if due >= message.until:\n", "        if False:\n", ALERTING, "after_a_day_it_is_given_up_and_told_of_once"),
    mutant("tries are not written down", "alerts/messenger", "        self.spool.keep(later)\n", "", ALERTING, "pauses_go_on_where_they_were_after_a_restart"),
    mutant("a clock set back puts off", "alerts/messenger", "return not now < due <= now + LONGEST_PAUSE", "return due <= now", ALERTING, "a_clock_that_was_set_back_puts_nothing_off"),
    mutant("the spool has no end", "alerts/spool", "len(self) >= self._most:", "False:", ALERTING, "a_full_spool_takes_no_more_and_then_tells_how_many_found_no_room"),
    mutant("a command is ended without its children", "alerts/command", "os.killpg(process.pid,", "os.kill(process.pid,", ALERTING, "a_command_leaves_nothing_behind_in_time_or_not"),
    mutant("a command has all the time", "alerts/command", "time.monotonic() + self._within)", "time.monotonic() + 1_000)", ALERTING, "a_command_leaves_nothing_behind_in_time_or_not"),
    mutant("a stop waits for the command", "alerts/command", "                _kill(self._running)\n", "                pass\n", ALERTING, "a_command_that_hangs_is_ended_with_its_children_by_a_stop"),
    mutant("a command sees our own variables", "alerts/command", ' if not name.startswith("PENSTOCK_")}', "} | {'PENSTOCK_TOKEN': 'x'}", ALERTING, "an_alert_reaches_log_command_and_webhook"),
    mutant("a stop waits for the receiver", "alerts/webhook", "        self._stopped.set()\n        self._hang_up()\n", "        self._stopped.set()\n", WEBHOOK, "a_delivery_can_be_cut_off"),
    mutant("the body is not signed", "alerts/webhook", ".encode() + body, hashlib", ".encode(), hashlib", WEBHOOK, "the_signature_is_over_id_time_and_body"),
    mutant("any address is called", "alerts/webhook", "if why := refusal(address, private=self._private):", "if why := '':", WEBHOOK, "the_address_behind_a_name_is_what_counts"),
    mutant("only the first address is checked", "alerts/webhook", "        for address in found:\n            if why", "        for address in list(found)[:1]:\n            if why", WEBHOOK, "one_forbidden_address_among_several_spoils_the_name"),
    mutant("the name is looked up again", "alerts/webhook", "to = (addresses[-rest], self._port)", "to = (self._host, self._port)", WEBHOOK, "what_was_checked_is_what_is_connected_to"),
    mutant("a mapped address passes", "core/outbound", "        near = found == _LOOPBACK or", "        near = found.ipv4_mapped is not None or found == _LOOPBACK or", WEBHOOK, "public_addresses_are_called_near_ones_on_request_and_others_never"),
    mutant("the keys of the cloud can be had", "core/outbound", "    if found.is_link_local:\n", "    if False:\n", WEBHOOK, "public_addresses_are_called_near_ones_on_request_and_others_never"),
    mutant("a redirect is an arrival", "alerts/webhook", "if 200 <= answer.status < 300:", "if 200 <= answer.status < 400:", WEBHOOK, "redirects_are_not_followed"),
    mutant("an answer has no end", "alerts/webhook", "_ANSWER: Final = 64 * 1024", "_ANSWER: Final = 1 << 40", WEBHOOK, "an_answer_that_is_too_long_or_none_counts_as_away"),
    mutant("the time is for each byte", "alerts/webhook", "        timer.start()\n", "", WEBHOOK, "the_time_is_for_all_of_it"),
    mutant("certificates are not looked at", "alerts/webhook", "ssl.create_default_context() if", "ssl._create_unverified_context() if", WEBHOOK, "over_tls_the_name_is_checked_against_the_certificate"),
    mutant("a shared secret signs", "alerts/webhook", "private_file(file).read_text", "file.read_text", WEBHOOK, "a_secret_that_others_can_read_signs_nothing"),
]  # fmt: skip
