#!lua flags=allow-oom
-- Dead-letter an entry that nobody can be answered for.
-- KEYS lane dead returned
-- ARGV consumer-group entry consumer lane-name id code reason body truncated maxlen
-- -> OK | LOST
if not owned(KEYS[1], ARGV[1], ARGV[2], ARGV[3], KEYS[3], ARGV[4]) then return 'LOST' end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[10], '*', 'id', ARGV[5], 'lane', ARGV[4], 'entry', ARGV[2],
  'code', ARGV[6], 'reason', ARGV[7], 'attempts', '0', 'body', ARGV[8], 'truncated', ARGV[9])
remove(KEYS[1], ARGV[1], ARGV[2])
return 'OK'
