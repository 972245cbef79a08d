"""Courses of a job: faults, repairs, resizes, new workers, draining nodes, the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestrator.control.course import follow

LOSSES = {
    "survivors continue at the last step without delay": """
        aaa max=3; train 7; kill 1; members 0 2; restored 7; train 1
        recovery cause=lost step=7 steps_redone=0 world_size_before=3 world_size=2 total_s=0.0
        recovery "lost=('rank 1 on node host-a (pid 101)',)"
        recovery "phases=detect fence select_step select_members rendezvous load recompute"
        finish steps=9 repairs=1 steps_redone=0 faults=lost:1 sizes=3-2""",
    "a repair sends only the necessary commands": """
        aaa max=3; train 2; kill 0; commanded fence 1 2; commanded store 0 1
        commanded assign 0 1 1 2 2; commanded stop; commanded drain""",
    "a replacement starts after the repair and joins at the end of a step": """
        aaa max=3; train 3; stuck 2; kill 1; replaced; release 2; replaced
        train 1; replaced 1:0; join; state resizing; train 1; members 0 2 3; restored 5
        finish sizes=3-2-3""",
    "a rank of a lost worker is its replacement's, and until then another's": """
        aaa max=3; train 3; kill 0; ranks 1:1 2:0; says "rank 0 is the worker on node"
        says "which was entered as rank 2"; train 1; join; train 1; ranks 1:1 2:2 3:0""",
    "lost while the first generation is assigned": """
        aaa max=3 auto=false; joined; switch auto=true; kill 2; wait 1
        states starting recovering running; restored; finish steps=1""",
    "lost while the first generation joins": """
        aaa max=3 auto=false; joined 0; switch auto=true; kill 2; wait 1
        states starting recovering running; restored; finish steps=1""",
    "a second loss while the first is fenced restarts the repair": """
        aaaa max=4; train 5; stuck 3; kill 0; state recovering; kill 2; release 3
        assigned 1 3; restored 5; train 1; recovery cause=lost""",
    "a second loss while the next generation joins restarts the repair": """
        aaaa max=4; train 5; switch auto=false; kill 0; state recovering; joined 1
        switch auto=true; kill 2; assigned 1 3; restored 5; train 1; recovery cause=lost""",
    "lost after others have finished": """
        aaa max=3; train 3; returns 0 1; kill 2; wait 1; members 3 4""",
    "lost after it has finished": """
        aaa max=3; train 1; returns 0; kill 0; state running; returns 1 2; succeeded faults=""",
    "a fatal loss waits for the cause that the cluster reports": """
        aaa max=3 max_faults=0; train 1; kill_unreported 1; wait 0.4; runs
        report_cause 1 "out of memory"; fails "was lost after step 1: out of memory" """,
    "too few workers wait for a replacement": """
        aa; train 3; kill 1; state recovering
        says "1 of at least 2 workers are left: waiting up to 300 s for replacements"
        replaced 1:0; wait 20; come; assigned 0 2; restored 3""",
    "too few workers wait for the cluster's head": """
        aa start_timeout_s=30; train 3; head away; says "head has not answered for 10 s"; kill 1
        wait 100; state recovering; head back; says "the cluster's head answers again"; come
        assigned 0 2; restored 3; says_times 2 "the cluster's head" """,
    "too few workers fail without a replacement": """
        aa start_timeout_s=30; train 3; kill 1; wait 30
        fails "1 of at least 2 workers are left" """,
    "replacements back off and avoid a failing node": """
        aaaabb min=1 max=6 replicas=0; train 1; kill 0; train 1; kill 1; train 1; kill 2
        train 1; kill 3; wait 10; replaced 0:0 1:1 2:2:a 3:4:a
        says "node host-a had 3 hardware faults" """,
    "an exhausted fault budget lists the faults, without old ones": r"""
        aaaaa min=1 max=5 max_faults=1 fault_window_s=9; train 1; kill 4; wait 10
        train 1; kill 3; wait 10; state running; train 1; kill 2; train 1; kill 1
        fails "rank 1 .* was lost after step 4.*before that: rank 2 .*lost after step 3: the proc"
        state failed""",
    "a spare replaces a lost worker": """
        aaa max=2 spares=1; train 3; members 0 1; kill 0; members 1 2""",
    "a lost spare is replaced without a repair": """
        aaa spares=1 max_faults=0; train 3; kill 2; state running; replaced 2:0
        faults lost; fault rank=None; says "worker 2 on node host-a" """,
    "only as many train as divide the step": """
        aaaa max=4; train 2; divide 4; train 1; kill 1; state running; train 2; size 2
        join; train 2; size 4; says "was lost"; says_times 1 ""
        finish sizes=4-2-4 steps_redone=0""",
    "workers that can never train are told": """
        aa max=4; train 1; divide 2; train 1; says "a step has 2 micro-batches"; says_times 1 ""
        says "of up to 4 workers (workers.max) 2 can train" """,
    "a replacement on a GPU waits for the lost process, which frees its memory": """
        aaaa max=4 gpus=1 start_timeout_s=50; train 3; linger 1 2; kill 1 2; state running
        train 2; wait 40; replaced; linger 2; wait 1; replaced 1; wait 15; replaced 1 2
        says "was killed, and still runs" """,
}
FAILURES = {
    "a failed collective is explained by a lost worker": """
        aaa max=3; train 3; crash 0 collective "timed out"; wait 1.5; state running
        kill 1; assigned 0 2; train 1; recovery cause=lost detect_s=1.5""",
    "a failed collective is no loss": """
        aaa max=3; train 3; crash 0 collective "timed out"; wait 1.5; state running
        wait 1.5; assigned 0 1 2; train 1; recovery cause=collective lost=() detect_s=3.0""",
    "a worker with a broken device is replaced, twice in the first step too": """
        aaa max=3; joined; crash 1 device "CUDA error" 1; state running; commanded kill 1
        fault cause=device step=1; says "cannot use its device"; wait 10; join; wait 1
        crash 0 device "CUDA error" 1; commanded kill 0 1 3; wait 10; join; wait 1
        finish faults=device:2""",
    "a device that is found broken after a fence is lost": """
        aaa max=3; train 3; stuck 2; kill 1; state recovering
        crash 2 device "cuda:0 is broken"; commanded kill 1 2; come; state running
        finish faults=device:1,lost:1""",
    "a worker that does not respond to its assignment is lost": """
        aaa max=3; unresponsive 1; wait 15; commanded kill 0 1 2; assigned 3 4 5""",
    "an error of the user's is retried once a step": """
        aaa min=1 max=3; train 4; crash 1 user "ValueError: at 0x0"; assigned 0 2; train 1
        crash 2 user "ValueError: at 0x1"; state running; crash 0 user "ValueError: at 0x2"
        fails "step 6 on rank 0.*a second time.*the user's frames" """,
    "a stop during a repair": """
        aaa max=3; train 2; stuck 2; kill 1; stop; release 2; stopped "after step 2" """,
    "survivors in a long call are waited for": """
        aaa min=1 max=3; train 3; stuck 1 2; beat 1; beat 2; kill 0; wait 25; state recovering
        says_times 3 "to leave"; says "since 6 s for rank 1 on node host-a (pid 101) to leave"
        says recovery.patience_s; release 1 2; members 1 2; commanded kill 0
        finish steps_redone=0 faults=lost:1""",
    "survivors that stay are killed and replaced": """
        aaa min=1 max=3; train 3; stuck 1 2; beat 1; beat 2; kill 0; wait 59; state recovering
        wait 3; replaced 0 1 2; come; come; come; wait 1; commanded kill 0 1 2
        finish steps_redone=0 faults=hang:2,lost:1""",
    "a survivor that stays does not take the others with it": """
        aaaa max=4; train 3; stuck 1; beat 1; slow kill 80; kill 0; wait 62
        commanded kill 0 1; members 2 3; finish faults=hang:1,lost:1""",
    "a replacement may take four measured first steps, whatever the limit for a start": """
        aa; wait 20; train 1; kill 0; wait 1; join; wait 0.5; assigned 1 2; stuck 2; beat 2; kill 1
        wait 61; says "it is killed after 80 s, 4 times the longest first step so far"
        commanded kill 0 1; wait 22; commanded kill 0 1 2; stop; stopped""",
    "a rank that stays after a drain is killed": """
        aa min=1 max=3; train 1; join; wait 0.5; state resizing; beat 1 waiting=true; leave 0
        stuck 1; wait 62; commanded kill 1 2; members 0""",
}
STATE = {
    "the newest checkpoint is used if all replicas are lost": """
        aab max=3 replicas=0 stored=[2]; train 3; lose_node b; loaded_from /runs/job/step-2
        says "going back to the checkpoint of step 2"; says "3 finished steps will be done again"
        finish steps=3 steps_redone=3""",
    "without a replica or a checkpoint the job starts over": """
        aaa max=3 mirrors=false engine=false; train 4; kill 2; wait 1; restored
        says "going back to the beginning"; finish steps=1 steps_redone=4""",
    "a damaged checkpoint is excluded": """
        aa auto=false stored=[10,20]; joined 0 1; switch auto=true
        crash 1 state "step-20/rank-0 is damaged" 0; restored 10
        says "step-20 cannot be read"; finish faults=state:1""",
    "the job does not begin anew if all checkpoints are damaged": """
        aa mirrors=false engine=false stored=[10,20]; wait 1; crash 1 state "damaged" 0
        wait 1; crash 3 state "damaged" 0
        fails "/runs/job/step-10 cannot be read.*--restart"; marked 10 20""",
    "damaged slots are excluded": """
        aaa max=3 stored=[1]; train 3; switch auto=false; kill 2; restored 4
        switch auto=true; switch losses_allowed=true; crash 0 state "a checksum is wrong" 0
        restored 3""",
    "a killed vault is replaced without a fault": """
        aaa max=3; train 3; kill_vault a; wait 0; vaults_closed a; vaults_opened a a
        state resizing; train 1; vault vault-a-2; members 0 1 2
        finish faults= steps_redone=0""",
    "a vault lost after a resize has selected its slots costs no step": """
        aa max=4; train 3; slow store 400; join a; leave 0; leave 1; kill_vault a; slow store 0
        turns 600; vaults_opened a a; commanded salvage 0 1; train 1; members 0 1 2
        finish faults= steps_redone=0 steps=5""",
    "a vault lost while a larger generation loads costs no step": """
        aa max=4; train 3; join a; switch auto=false; train 1; assigned 0 1 2; kill_vault a
        switch auto=true; crash 0 state "its vault is gone" 0; vaults_opened a a
        commanded salvage 0 1; train 1; members 1 3 4; finish steps_redone=0 steps=6""",
    "a vault that hangs is replaced, later than one that is slow": """
        aaa max=3; train 3; vault_is a hangs; wait 60; vaults_opened a; train 1; wait 6
        vaults_closed a; vaults_opened a a; state resizing; train 1; vault vault-a-2
        members 0 1 2; finish faults= steps_redone=0""",
    "a vault that is broken is replaced": """
        aaa max=3; train 3; vault_is a broken; wait 2; vaults_closed a; vaults_opened a a
        state resizing; train 1; vault vault-a-2; members 0 1 2
        finish faults= steps_redone=0""",
    "training continues without a vault": """
        aaa max=3; train 1; no_vault_opens; kill_vault a; wait 30; says "no vault on node host-a"
        state running; train 2; vaults_open; wait 60; state resizing""",
    "an unused vault is closed once a newer step is complete without it": """
        aab max=3; train 3; drain b; train 2; members 0 1; vaults_closed
        wait 60; train 1; vaults_closed b; says_times 0 vault""",
    "an unused vault is kept while a mirror is due": """
        aab max=3 mirrors=false; train 3; drain b; train 2; members 0 1
        wait 60; train 1; vaults_closed; wait 60; train 1; vaults_closed
        switch mirrors=true; train 2; vaults_closed; wait 60; train 1; vaults_closed b
        says_times 0 vault""",
    "a job resumes from the newest checkpoint": """
        aa stored=[20,40]; joined; restored 40; resumed 40; loaded_from /runs/job/step-40; train 2
        finish steps=43 steps_trained=3 resumed_from=/runs/job/step-40; says_times 0 "no step" """,
    "a job trains once all ranks have joined": """
        aa auto=false; joined 0; states starting; joined 1; states starting running
        stop; wait 30; stopped""",
}
RESIZES = {
    "new workers join in one batch at the end of a step": """
        aa max=4; train 3; come; wait 0.25; state running; join; state resizing; train 2
        members 0 1 2 3; recovery "reason=from 2 to 4 workers" step=4
        recovery "phases=drain select_step select_members rendezvous load recompute"
        finish steps=6 steps_redone=0 sizes=2-4""",
    "scaling down releases workers after the resize": """
        aaaa max=4; train 2; scale 2 2; state resizing; commanded dismiss; train 1
        members 0 1; commanded dismiss 2 3; faults; finish faults=""",
    "a worker that is wanted again before its resize ends stays": """
        aaa max=3; train 2; switch auto=false; scale 1 1; train 1; assigned 0; scale 1 2; joined 0
        wait 1; commanded dismiss 2; switch auto=true; kill 0; wait 1; train 1; members 1""",
    "scaling up trains on until the new workers are ready": """
        aa; train 1; scale 3 5; train 3; state running; join; train 1; members 0 1 2""",
    "workers of a draining node are replaced before it is lost": """
        aabb max=4 max_faults=0; train 3; drain b; state resizing; train 1; members 0 1
        replaced 2:0:b 3:0:b; lose_node b; train 1; recovery "reason=a node is draining"
        says "node host-b is draining"; finish faults=""",
    "a loss on a draining node is no fault": """
        aab max=3 max_faults=0; train 3; drain b; kill 2; state running
        finish faults=preempted:1""",
    "a draining node is used until replacements are ready": """
        ab; train 1; drain b; state running; join a; train 1; members 0 2""",
    "a job without an engine is never resized": """
        aa max=4 engine=false; train 2; come; wait 10; state running""",
    "a job that finishes is not resized": """
        aa max=4; train 1; come; last; wait 10; succeeded steps=2""",
    "a job that finishes in its drain": """
        aa max=4; train 1; join; state resizing; last; wait 10; succeeded steps=2""",
    "a loss during a drain": """
        aaa max=5; train 3; join; state resizing; kill 1; members 0 2; retired 3""",
    "a new worker is lost before the resize": """
        aa max=3; train 1; come; kill 2; wait 0.5; members 0 1""",
    "a new worker is lost during the resize": """
        aa max=3; train 1; join; switch auto=false; train 1; switch auto=true; kill 2; wait 0.5
        members 0 1""",
    "a new worker that fails to start is reported, and others may come": """
        aa max=3; train 1; fail_to_start "a worker did not start: no torch"; says "no torch"
        join; train 1; members 0 1 2""",
}
NEWCOMER = """
    aa min=1 max=4 start_timeout_s=50; switch prepares=false; train 3; join
    called_ahead 2 2 of 3; train 2; state running
    """
# Of a job that continues without rank 1, whose function has failed.
LEFT_OUT = """
    crash 3 user; members 0 2; dead 1 3; faults lost newcomer
    says "the job continues without rank 1, whose function failed"
    train 3; wait 60; replaced 1; kill 2; wait 10; replaced 1 2 3; come; come; wait 10
    train 2; size 3
    """
NEW_FUNCTIONS = {
    "are called in new processes where they do not continue, in all that start": """
        aaa min=1 max=3; train 3; starts_took 5; leaving 0 1; switch auto=false; kill 2
        commanded kill 0 1 2; replaced 0:0 1:0 2:0; switch auto=true
        come; wait 4; training; come; wait 4; training; come; assigned 3 4 5; restored 3
        says "is called again, in new processes (ranks 0, 1): it was outside its training loop"
        finish steps_redone=0""",
    "are called where one starts in twice the time of the first": """
        aaa min=1 max=3; train 3; starts_took 5; leaving 0 1; switch auto=false; kill 2
        switch auto=true; come; wait 9; training; wait 1; assigned 3; restored 3""",
    "bound to their ranks wait for the lost one, and are called again without": """
        aaa min=1 max=3; switch bound=true; train 3; starts_took 5; kill 1; wait 4; training
        come; ranks 0:0 2:2 3:1; functions_stay True; train 1
        kill 2; wait 10; assigned 4 5
        says "it continues only with the same rank and number"; functions_stay False""",
    "that fail are left out until the next fault": """
        aaa max=3; train 3; kill 1; train 1; replaced 1:0; come; wait 1; train 1
        members 0 2 3"""
    + LEFT_OUT,
    "that fail are left out even below workers.min": """
        aaa min=3; train 3; kill 1; replaced 1:0; come; wait 1; members 0 2 3"""
    + LEFT_OUT,
    "are waited for until they are prepared, while the others train": NEWCOMER
    + """prepare 2; state resizing; train 1; members 0 1 2; ranks 0:0 1:1 2:2
        finish steps_redone=0 faults=""",
    "may fail while the others train": NEWCOMER
    + """crash 2 user "ZeroDivisionError: a mean over nothing" 0; state running; faults newcomer
        fault rank=2 is_fatal=False; says "a mean over nothing"; says "the user's frames"
        says "without rank 2"; replaced; train 2; kill 1; train 1; wait 1; replaced 1 2""",
    "that return or are late are left out": NEWCOMER
    + """returns 2; dead 2; says "returned before it trained"; returns 2; faults newcomer
        join; wait 50; faults newcomer newcomer; says "within 50 s"; state running""",
    "of workers that come meanwhile are called later": NEWCOMER
    + """join; called_ahead 3; switch prepares=true; prepare 2; train 1; assigned 0 1 2
        wait 0.5; train 1; assigned 0 1 2 3; finish sizes=2-3-4""",
    "whose rank a fault has taken are called again": NEWCOMER
    + """kill 1; assigned 0; retired 2; switch prepares=true; train 1; wait 0.5; train 1
        ranks 0:0 3:1""",
    "continue in the place of a lost one": """
        ab; switch prepares=false; train 3; drain b; join c; called_ahead 2 1 of 2
        kill 1; ranks 0:0 2:1; retired""",
    "are not called ahead of a generation without survivors": """
        a min=1; train 2; drain a; join b; called_ahead 1; train 1; functions_stay False
        assigned 1""",
    "are called again where functions do not stay": NEWCOMER
    + """leaving 0 1; prepare 2; train 1; retired 0 1 2; wait 1; functions_stay False; size 3""",
}
CHECKPOINTS_AND_STOPS = {
    "a stop waits for long calls, also without checkpoints": """
        aa; train 1; stuck 0 1; stop; stop; wait 14; commanded stop 0 1; commanded fence
        release 0; commanded fence 1; wait 15; runs; release 1; stopped "after step 1"
        states starting running stopping stopped""",
    "a stop does not wait longer than the grace period for a long call": """
        aa; train 1; stuck 1; stop; wait 29.9; runs; wait 0.1; stopped
        says "(the stop takes at most 30 s, checkpoint.grace_period_s)" """,
    "a stop does not wait longer for a worker that does not respond": """
        aa; train 1; unresponsive 1; stop; wait 30; stopped""",
    "a stop is immediate before the workers start": """
        aa; no_worker_starts; stop; stopped""",
    "a stop is immediate where a rank has finished": """
        aa; joined; returns 0; stop; stopped""",
    "a failed write is retried": """
        aaa max=3 every_steps=2; writes_fail 2; train 3; retries 1.0; wait 1; wait 2; stored 2
        finish written=2 failed=2""",
    "a write that always fails is given up": """
        aaa max=3 every_steps=2; store_fails 7 "the disk is full"; train 3; wait 63
        retries 1.0 2.0 4.0 8.0 16.0 32.0 None; pinned; train 1; stored 4""",
    "a write of a missing slot is not retried": """
        aaa max=3 every_steps=2; slot_is_missing; train 3; retries None""",
    "training and repairs do not wait for a checkpoint": """
        aaa max=3 every_steps=2; writes_hang; train 3; kill 1; train 2; pinned 2 4; stored
        writes_end; stored 2 4; train 4; stored 2 4 6 8; pinned""",
    "the end waits for the last checkpoint": """
        aaa max=3 every_steps=2; train 1; writes_hang; last; wait 30; runs; writes_end
        succeeded written=1""",
    "a stop writes a checkpoint after the step, where none is due": """
        aaa max=3 every_steps=100; train 6; stop; state stopping; train 1; stored 7
        stopped "after step 7" """,
    "a stop writes one checkpoint after the step where one is due": """
        aaa max=3 every_steps=3; train 2; stop; state stopping; train 1; stored 3
        stopped "after step 3" """,
    "a stop writes the previous step if the current one is long": """
        aaa max=3 every_steps=100 grace_period_s=10; train 6; stop; wait 5; stored 6; stopped""",
    "a stop writes the previous step if a worker is lost": """
        aaa max=3 every_steps=100 grace_period_s=10; train 6; stop; kill 1; stored 6; stopped""",
    "a stop ends within its grace period": """
        aaa max=3 every_steps=100 grace_period_s=10; train 6; writes_hang; stop; wait 9.9
        runs; wait 0.1; stopped""",
    "a missed last checkpoint is written from the vaults": """
        aa steps=6 every_steps=5; train 5; finish written=2 failed=0; commanded salvage
        stored 5 6""",
    "a missed last checkpoint is written from the workers, if a vault was lost": """
        aa steps=6 every_steps=5; train 5; kill_vault a; finish written=2 failed=0
        commanded salvage 0 1; stored 5 6""",
    "the last step of a job without steps is stored from the vaults": """
        aa every_steps=5; train 6; finish; stored 5 7""",
    "the last step of a job without steps is stored from the workers": """
        aa every_steps=5 mirrors=false; train 6; finish; stored 5 7""",
    "a function without an engine has nothing to store": """
        aa engine=false steps=6 every_steps=5; train 5; finish; stored""",
    "a last checkpoint that cannot be stored fails the job": """
        aa steps=6 every_steps=5; train 5; store_fails 7 "the folder is read-only"; last; wait 63
        fails "ended after step 6.*6 is not stored: the folder is read-only.*of step 5 in /runs/job"
        state failed""",
    "a state that nobody holds fails the job": """
        aa every_steps=5 mirrors=false; train 6; functions_hold null; last
        fails "step 7 is not stored: no complete copy of its state is left"; stored 5""",
    "a state of another step, such as of the best model, is not stored as the last": """
        aa every_steps=5 mirrors=false; train 6; functions_hold 3; last
        fails "step 7 is not stored: no complete copy of its state is left"; stored 5""",
    "a removed checkpoint is not the newest any more": """
        aa steps=6 every_steps=5; train 5; stored 5; store_fails 14 "it is read-only"
        folder_removed; last; wait 126; fails "there is no other one" """,
    "a step that is retried gives way to the last one": """
        aa steps=6 every_steps=5; store_fails 2 "the disk is full"; train 5; last; wait 1
        succeeded written=1 failed=2; stored 6""",
}
INJECTED = {
    "a vault is killed, recorded and opened again, once": """
        aabb max=4 faults=["kill_vault(node=1,step=3)"]; train 1; fired; train 1
        node_faults b:kill_vault; fired kill_vault:2:3; says_of_faults 1; vaults_opened a b b
        train 3; node_faults b:kill_vault""",
    "a node that is dropped is repaired": """
        aabb max=4 faults=["drop_node(node=1,step=3)"]; train 4; fired drop_node:2:3
        members 4 5""",
    "an impossible fault is told of once, and not recorded": """
        aabb max=4 faults=["partition(node=0,step=2,seconds=5)"]
        not_injectable a "the job's controller runs on that node"; train 5; node_faults; fired
        says_times 1 "was not injected: the job's controller runs on that" """,
    "a fault of a node waits until the node has ranks": """
        aabb max=4 faults=["kill_vault(node=2,step=2)"]; train 3; come c; scale 2 5; wait 1
        train 3; node_faults c:kill_vault""",
}
HEALTH = {
    "a slow node is measured twice, named and avoided before the first step": """
        aabbcc min=4 max=6; measures c memory=3.1; train 1; members 0 1 2 3; checked c
        says "memory bandwidth 3.1 GB/s, limit 6 GB/s (0.5 of the median of 3 nodes)"
        wait 1; replaced 4:0:c 5:0:c; train 3; health host-c:True; states starting running""",
    "an unhealthy node is used where the others are too few": """
        aabbcc min=6; measures c disk=0.5; train 1; members 0 1 2 3 4 5; checked
        says "free disk space 0.5 GiB, limit 1 GiB" """,
    "of two nodes none is called slow, and each has its own errors": """
        aabb min=2 max=4; measures b memory=1 gpu_xid/3=79 clock=90; train 1; members 0 1; checked
        says "GPU 3: Xid since its start 79, limit 0"; says "fix: reset the GPU" """,
    "nodes that fail all are used": """
        aabb min=1 max=4; measures ab gpu_ecc/0=2; train 1; members 0 1 2 3
        kill 3; train 1; replaced 3:0; health host-a:True host-b:True""",
    "a node with slow ways to both neighbours is left at the end of a step": """
        aabbcc min=2 max=6; measures b link=0.2; train 1; wait 1; train 2; members 0 1 4 5
        checked b; says "bandwidth to its neighbours 0.2 GB/s, limit 0.25 GB/s (0.25 of" """,
    "a new worker on an unhealthy node is not used": """
        aab min=2 max=4; train 1; measures c compute_errors=1; join c; wait 1; train 1
        members 0 1 2; health host-c:True; replaced 3:0:c; dead 3""",
    "a node is checked again after two faults, within the delay of its replacement": """
        aabbcc min=1 max=6; train 1; kill 4; train 1; checked; measures c memory=2; kill 5; train 1
        wait 1; checked c c; replaced 4:0 5:1:c; health host-c:True""",
    "a node that passes again is used again": """
        aabbc min=2 max=5 after_faults=1; measures c memory=2; train 1; members 0 1 2 3
        measures b disk=0.5; kill 2; train 1; wait 1; health host-c:True host-b:True
        measures b disk=9; kill 3; train 1; wait 1; replaced 2:0:b:c 3:1:c 4:0:c
        health host-c:True host-b:True host-b:False""",
    "nothing is checked if it is off": """
        aabbcc enabled=false min=1 max=6 after_faults=1; measures c memory=1; train 1; kill 5
        train 1; members 0 1 2 3 4; checked; health""",
}
COURSES = {
    **{f"health: {name}": course for name, course in HEALTH.items()},
    **{f"injected: {name}": course for name, course in INJECTED.items()},
    **{f"loss: {name}": course for name, course in LOSSES.items()},
    **{f"failure: {name}": course for name, course in FAILURES.items()},
    **{f"state: {name}": course for name, course in STATE.items()},
    **{f"resize: {name}": course for name, course in RESIZES.items()},
    **{f"new functions: {name}": course for name, course in NEW_FUNCTIONS.items()},
    **{f"checkpoints, end: {name}": course for name, course in CHECKPOINTS_AND_STOPS.items()},
}


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
async def test_course(folder: Path, course: str):
    await follow(folder, course)


@pytest.mark.parametrize("turns", range(30))
async def test_two_losses_in_quick_succession(folder: Path, turns: int):
    course = f"aaa min=1 max=3; train 2; begin_kill 1; turns {turns}; kill 2"
    await follow(folder, f"{course}; finish steps=3 steps_redone=0 faults=lost:2")
