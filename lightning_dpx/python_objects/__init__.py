"""What Python objects hold, and how it is compared, put back and searched.

object_graph        which objects lead to which, as the garbage collector sees them
origin              whether a class or a file is Python's, a framework's, installed, or the user's
code_map            what the code of classes names, followed once
reachable           objects that the code of a module can reach, globals included
process_generators  whether Python's and NumPy's generators were drawn from, without a copy
preserve            every random generator in reach, remembered and put back
object_state        what the objects behind attributes hold, to be compared or put back
object_walk         finds all of those objects, and what hides its state
object_contents     what one of them holds, and how it holds that again
overrides           attributes that are others for a while
shared_patch        a change of the process that lasts as long as any thread needs it
compiled            what torch.compile has compiled, and runs without it
gc_pause            Python's collector of cyclic garbage rests
trial_garbage       what a trial of a step leaves in cycles is freed, and nothing older is searched
other_threads       whether code of the user's own runs beside this thread
interrupted_calls   whether a call still runs, where Ctrl-C may have ended it
leave_no_trace      a run of a module that leaves no trace
digest              a short text that tells runs apart by what they depend on
"""
