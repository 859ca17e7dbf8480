"""What Python objects hold, and how it is compared, put back and searched.

object_graph  which objects lead to which, as the garbage collector sees them
reachable     objects that the code of a module can reach, globals included
preserve      every random generator in reach, remembered and put back
object_state  what the objects behind the attributes of modules hold, to be compared or put back
untouched     a run of a module that leaves no trace
"""
