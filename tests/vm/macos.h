/* Just enough of macOS's headers to compile the layer for it; every header of the stub SDK includes this one. */
#pragma once
#include <stddef.h>
#define O_WRONLY 1
#define O_APPEND 8
#define STDERR_FILENO 2
#define PTHREAD_MUTEX_INITIALIZER {0x32AAABA7, {0}}
typedef struct { long sig; char opaque[56]; } pthread_mutex_t;
int pthread_mutex_lock(pthread_mutex_t *), pthread_mutex_unlock(pthread_mutex_t *);
int open(const char *, int, ...), close(int), dprintf(int, const char *, ...), unsetenv(const char *);
long strtol(const char *, char **, int);
int snprintf(char *, size_t, const char *, ...), sysctlbyname(const char *, void *, size_t *, void *, size_t);
char *getenv(const char *), *strchr(const char *, int), *strstr(const char *, const char *);
typedef struct objc *id, *Class, *SEL, *Method;
typedef void (*IMP)(void);
SEL sel_registerName(const char *), method_getName(Method), object_getClass(id), class_getInstanceMethod(Class, SEL);
IMP class_getMethodImplementation(Class, SEL), method_setImplementation(Method, IMP), method_getImplementation(Method);
_Bool class_addMethod(Class, SEL, IMP, const char *);
const char *method_getTypeEncoding(Method);
