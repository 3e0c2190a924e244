"""Bugs that somebody could write into the HTTP API: a door left open, a name that leaks."""

from __future__ import annotations

from tests.mutants.planting import planter_for_one

COST = "tests/http/test_loop_cost.py"
FAIRNESS = "tests/http/test_fairness.py"
LISTENING = "tests/http/test_listening.py"
CONNECTION = "tests/http/test_connection.py"
RIGHTS = "tests/http/test_rights.py"
TOKENS = "tests/http/test_tokens.py"
WAITING = "tests/http/test_waiting.py"
PAGE = "tests/http/test_page.py"


mutant = planter_for_one("http", "penstock/http/{}.py")

MUTANTS = [
    mutant("any Host will do", "guard", "    if host not in exposure.hosts:\n", "    if False:\n", RIGHTS, "nobody_comes_past_the_door_whatever_the_route_and_the_verb"),
    mutant("any Origin will do", "guard", "    if origin is not None and not _own", "    if False and not _own", RIGHTS, "nobody_comes_past_the_door_whatever_the_route_and_the_verb"),
    mutant("any site will do", "guard", '    if headers.get(b"sec-fetch-site", b"none") not in _SAME:\n', "    if False:\n", RIGHTS, "nobody_comes_past_the_door_whatever_the_route_and_the_verb"),
    mutant("a name that begins like ours is ours", "guard", "    if host not in exposure.hosts:\n", "    if not host.startswith(tuple(exposure.hosts)) and not host.endswith('example'):\n", RIGHTS, "nobody_comes_past_the_door_whatever_the_route_and_the_verb"),
    mutant("no scope is asked for", "app", "route.scope not in who.scopes", "not who.name", RIGHTS, "each_route_wants_its_own_scope_and_no_other_will_do"),
    mutant("an expired token counts", "tokens", "or self._expired(found[1])", "", TOKENS, "a_token_expires_by_the_clock"),
    mutant("the id of a token is enough", "tokens", "if found is None or not same or", "if found is None or", RIGHTS, "nobody_comes_past_the_door_whatever_the_route_and_the_verb"),
    mutant("a revoked token counts elsewhere", "tokens", "        if self._timer() >= self._look_at:\n", "        if False:\n", TOKENS, "a_token_revoked_elsewhere_is_refused_within_a_second"),
    mutant("a shared file of tokens is read", "tokens", "        private_file(self.path)\n", "", TOKENS, "a_file_that_others_can_read_is_refused"),
    mutant("anything is taken for JSON", "body", '        if content_type != b"application/json":\n', "        if False:\n", RIGHTS, "only_json_is_understood"),
    mutant("a stranger comes by the socket", "listening", "if user not in (os.geteuid(), 0):", "if False:", CONNECTION, "a_visitor_of_another_user_is_not_let_in"),
    mutant("another's job is shown", "office", "if job is None or not self.owns(job.intent.addon_id):", "if job is None:", RIGHTS, "a_token_of_another_addon_meets_nothing_of_ours"),
    mutant("another's lease can be used", "office", "if lease is None or not self.owns(lease.addon_id):", "if lease is None:", RIGHTS, "a_token_of_another_addon_meets_nothing_of_ours"),
    mutant("another addon can be named", "office", "if bound is not None and asked is not None and asked != bound:", "if False:", RIGHTS, "a_token_of_another_addon_meets_nothing_of_ours"),
    mutant("another's events are told", "stream", "            if self._addon_id is not None:\n", "            if False:\n", WAITING, "a_stream_of_an_addon_tells_of_no_other"),
    mutant("who is in the way is told", "office", "        if (addon_id := self.principal.addon_id) is not None:\n", "        if (addon_id := None) is not None:\n", RIGHTS, "a_bound_token_does_not_learn_whose_job_is_in_its_way"),
    mutant("events are told as they are", "stream", "        if viewer is None or not events:\n", "        if True:\n", "tests/http/test_others.py", "nothing_that_a_bound_token_can_get_names_anything_of_another_addon"),
    mutant("a token gives away more than it has", "admin", "    if problems:\n", "    if False:\n", RIGHTS, "nobody_can_give_away_more_than_they_have"),
    mutant("a cookie is enough", "sessions", 'return f"session {self.cookie} {cookie} {half}"', 'return f"session {self.cookie} {cookie}"', PAGE, "a_cookie_alone_is_worthless_whatever_is_made_of_it"),
    mutant("the other half is computed from the cookie", "sessions", "        self._tokens.add(token_id", '        half = _digest(cookie.partition("=")[2] or cookie)\n        self._tokens.add(token_id', PAGE, "a_cookie_alone_is_worthless_whatever_is_made_of_it"),
    mutant("a cookie is a bearer token", "sessions", 'cookie, half = f"{token_id}.{secrets.token_urlsafe(32)}", secrets.token_urlsafe(32)\n        self._tokens.add(token_id, self._proof(cookie, half), asked, who)', 'half = secrets.token_urlsafe(32)\n        cookie = f"{token_id}.{half}"\n        self._tokens.add(token_id, self._proof(cookie, half), asked, who)', PAGE, "a_cookie_alone_is_worthless_whatever_is_made_of_it"),
    mutant("all instances share a cookie", "sessions", "-{_digest(str(tokens.path.resolve()))[:10]}", "", PAGE, "the_cookie_is_of_one_instance"),
    mutant("a code outlives its token", "tokens", "            if by is not None and not self.alive(by):\n", "            if False:\n", TOKENS, "a_token_that_has_ended_makes_no_child"),
    mutant("children outlive their parent", "tokens", "if k.token.parent_id is None or k.token.parent_id in ids]", "if True]", TOKENS, "children_end_with_their_parent"),
    mutant("a stream outlives its token", "token_watch", "if not self._tokens.alive(principal):", "if False:", WAITING, "a_long_poll_ends_when_its_token_is_revoked"),
    mutant("the limits of a token are forgotten", "office", "        if problems:\n            raise OverLimit", "        if False:\n            raise OverLimit", RIGHTS, "a_token_has_limits_of_cost_and_priority"),
    mutant("the depth of a body is found by a regular expression", "body", "    brackets = b\"\".join(plain.split(b'\"')[::2]).translate(_BRACKETS, _REST)\n", "    brackets = __import__('re').sub(rb'(?s)\"[^\"\\\\]*(?:\\\\.[^\"\\\\]*)*\"', b'', body).translate(_BRACKETS, _REST)\n", COST, "no_body_costs_more_than_its_size"),
    mutant("the place of a mistake is found by a regular expression", "body", '    message, _, place = str(error).rpartition(" - at ")\n', '    place = __import__("re").search(r"(?s)( - at (`key` in )?`\\$.*`)?$", str(error))[0][6:]\n    message = str(error)[: -len(place) - 6] if place else ""\n', COST, "no_body_costs_more_than_its_size"),

    mutant("trailers count as headers", "connection", "        if self._in_head:\n            super().on_header(name, value)\n", "        super().on_header(name, value)\n", CONNECTION, "trailers_are_no_headers"),
    mutant("one addon may have all threads", "pool", " or self._running[o] < self._per_owner), None)", " or True), None)", FAIRNESS, "slow_reads_of_one_addon_delay_no_heartbeat_of_another"),
    mutant("calls are made first come first served", "pool", "                self._queues.move_to_end(owner)\n", "                pass\n", FAIRNESS, "owners_take_turns_and_each_is_served_in_its_order"),
    mutant("plain HTTP is taken from any address", "listening", "        return self._tls or _plain(address).is_loopback or self.is_proxy(address)\n", "        return True\n", LISTENING, "plain_http_from_an_undeclared_address_is_refused"),
    mutant("a full listener refuses newcomers", "budget", "            if (holder := held.idle()) is not None:\n", "            if False and (holder := held.idle()) is not None:\n", LISTENING, "clients_that_say_nothing_lock_nobody_out"),
    mutant("one peer may have all places", "budget", "len(own) >= self._per_peer and", "len(own) >= self._most and", LISTENING, "one_peer_cannot_have_all_places"),
    mutant("a handshake may take its time", "listening", '"ssl_handshake_timeout": self._doors.head_sec', '"ssl_handshake_timeout": 600.0', LISTENING, "a_handshake_that_is_not_made_is_cut_off"),
    mutant("an answer may wait for its reader for ever", "connection", "self.loop.call_later(self._doors.unread_sec, self.transport.abort)", "self.loop.call_later(1e9, self.transport.abort)", LISTENING, "a_client_that_does_not_read_its_answer_is_dropped"),
    mutant("connections may use all descriptors", "listening", "max(4, most // 2 - unix)", "max(4, 4 * most)", LISTENING, "half_of_the_descriptors_are_kept_back_for_jobs"),
]  # fmt: skip
