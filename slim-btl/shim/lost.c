/* The loss of a peer: what Open MPI is told. */
#include "slim_btl.h"

#if SLIM_BTL_OPEN_MPI_5
#include "ompi/proc/proc.h"
#include "ompi/runtime/params.h"
#endif

#include <stdio.h>
#include <unistd.h>

mca_btl_base_module_error_cb_fn_t slim_btl_on_error;

static const char *host_of(const opal_proc_t *peer)
{
    const char *host = NULL;

    if (NULL != peer) {
#if SLIM_BTL_OPEN_MPI_5
        host = opal_get_proc_hostname(peer);
#else
        host = peer->proc_hostname;
#endif
    }
    return NULL != host ? host : "a host unknown";
}

/* One write: fprintf writes a long line in pieces, and mpirun may put other output between them. */
static void say(const opal_proc_t *peer, uint32_t rank, const char *why, int len, const char *what_follows)
{
    char line[1024];
    size_t room = sizeof line - 1;
    int n = snprintf(line, room, "slim: rank %u has lost rank %u (%s): %.*s%s", (unsigned)OPAL_PROC_MY_NAME.vpid,
                     (unsigned)rank, host_of(peer), len, why, what_follows);
    size_t end = n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;

    line[end] = '\n';
    if (0 > write(STDERR_FILENO, line, end + 1)) {
        return; /* nobody reads stderr any more */
    }
}

#if SLIM_BTL_OPEN_MPI_5 && OPAL_ENABLE_FT_MPI
/* It is in libmpi, which a program that uses only libopen-pal does not have. */
extern bool ompi_ftmpi_enabled __attribute__((weak));

/* Whether the job goes on without a lost rank (ULFM, mpirun --with-ft ulfm). */
bool slim_btl_survives_losses(void)
{
    return NULL != &ompi_ftmpi_enabled && ompi_ftmpi_enabled;
}

/* Tells all ranks, by the runtime, that a process has failed. Otherwise only the ranks that lose it themselves would know. */
static void announce_failure(opal_process_name_t name)
{
    opal_process_name_t mine = OPAL_PROC_MY_NAME;
    pmix_proc_t me, affected;
    pmix_info_t info[1];
    pmix_status_t rc;

    OPAL_PMIX_CONVERT_NAME(&me, &mine);
    OPAL_PMIX_CONVERT_NAME(&affected, &name);
    PMIX_INFO_CONSTRUCT(&info[0]);
    PMIX_INFO_LOAD(&info[0], PMIX_EVENT_AFFECTED_PROC, &affected, PMIX_PROC);
    rc = PMIx_Notify_event(PMIX_ERR_PROC_TERM_WO_SYNC, &me, PMIX_RANGE_GLOBAL, info, 1, NULL, NULL);
    PMIX_INFO_DESTRUCT(&info[0]);
    if (PMIX_SUCCESS != rc && PMIX_OPERATION_SUCCEEDED != rc) {
        opal_output(0, "btl:slim: the runtime was not told that rank %u has failed: %s", (unsigned)name.vpid,
                    PMIx_Error_string(rc));
    }
}

static opal_process_name_t name_of(uint64_t name)
{
    return (opal_process_name_t){.jobid = (opal_jobid_t)(name >> 32), .vpid = (opal_vpid_t)name};
}

/* Whether the runtime has told of its death already, or it is in no communicator of this rank. */
int slim_btl_has_failed(void *proc, uint64_t name)
{
    opal_proc_t *peer = NULL != proc ? proc : opal_proc_for_name(name_of(name));

    return NULL == peer || !ompi_proc_is_active((ompi_proc_t *)peer);
}

/* ULFM goes on without the peer. */
static bool lost_but_survived(opal_proc_t *peer, uint64_t id, const char *why, int len)
{
    const opal_process_name_t name = name_of(id);

    if (!slim_btl_survives_losses()) {
        return false;
    }
    if (slim_btl_has_failed(peer, id)) {
        return true;
    }
    if (NULL == peer) {
        peer = opal_proc_for_name(name); /* only the peer has asked for the connection */
    }
    say(peer, name.vpid, why, len, "; it counts as failed from here on (ULFM)");
    announce_failure(name);
    if (NULL != slim_btl_on_error) {
        slim_btl_on_error(&mca_btl_slim_module, MCA_BTL_ERROR_FLAGS_NONFATAL, peer, "connection lost");
    }
    return true;
}
#else
bool slim_btl_survives_losses(void)
{
    return false;
}

int slim_btl_has_failed(void *proc, uint64_t name)
{
    (void)proc;
    (void)name;
    return 0;
}

static bool lost_but_survived(opal_proc_t *peer, uint64_t id, const char *why, int len)
{
    (void)peer;
    (void)id;
    (void)why;
    (void)len;
    return false;
}
#endif

void slim_btl_lost(void *proc, uint64_t name, const char *why, size_t len)
{
    opal_proc_t *peer = proc;

    if (lost_but_survived(peer, name, why, (int)len)) {
        return;
    }
    /* The callback of 4.1 ends the job without a word. */
    say(peer, (uint32_t)name, why, (int)len, "");
    if (NULL != slim_btl_on_error) {
        slim_btl_on_error(&mca_btl_slim_module, MCA_BTL_ERROR_FLAGS_NONFATAL, peer, "connection lost");
    }
}
